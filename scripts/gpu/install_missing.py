"""Installs missing distributions from a folder of wheels, without downloads.

usage: install_missing.py SITE WHEELS
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# Installed into SITE also if another version exists, which may be too old for the others.
REPLACED = frozenset({"pytest", "pytest-xdist", "pluggy"})


def name_and_version(wheel: Path) -> tuple[str, str]:
    """Return the normalized name and the version from a wheel's file name."""
    name, version = wheel.name.split("-")[:2]
    return name.lower().replace("_", "-").replace(".", "-"), version


def missing(wheels: Iterable[Path]) -> list[Path]:
    """Return the wheels of distributions that are missing, or in REPLACED with another version."""
    selected = []
    for wheel in sorted(wheels):
        name, version = name_and_version(wheel)
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            selected.append(wheel)
            continue
        if name in REPLACED and installed != version:
            selected.append(wheel)
    return selected


def main() -> None:
    """Install the missing distributions."""
    site = Path(sys.argv[1])
    folder = Path(sys.argv[2])
    site.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(site))  # finds what an earlier run has installed
    wheels = missing(folder.glob("*.whl"))
    print(f"unpack: {len(wheels)} distributions to install into {site}")
    if not wheels:
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    flags = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade"]
    target = ["--target", str(site)]
    installation = subprocess.run([*pip, *flags, *target, *map(str, wheels)], check=False)
    # To compile vLLM takes 30 s, which each of its processes would need otherwise.
    compilation = [sys.executable, "-m", "compileall", "-q", "-q", "-j", "0", str(site)]
    subprocess.run(compilation, check=False)
    raise SystemExit(installation.returncode)


if __name__ == "__main__":
    main()
