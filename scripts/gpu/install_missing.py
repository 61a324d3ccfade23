"""Installs from a folder of wheels those distributions that this Python lacks. Downloads nothing.

usage: install_missing.py SITE WHEELS
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# What is there may be too old for the others: these go into SITE wherever another version is found.
REPLACED = frozenset({"pytest", "pytest-xdist", "pluggy"})


def name_and_version(wheel: Path) -> tuple[str, str]:
    """As the file's name has them; the name in its normal form."""
    name, version = wheel.name.split("-")[:2]
    return name.lower().replace("_", "-").replace(".", "-"), version


def missing(wheels: Iterable[Path]) -> list[Path]:
    """Those that this Python has not, or in another version where that matters."""
    found = []
    for wheel in sorted(wheels):
        name, version = name_and_version(wheel)
        try:
            there = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.append(wheel)
            continue
        if name in REPLACED and there != version:
            found.append(wheel)
    return found


def main() -> None:
    site, folder = Path(sys.argv[1]), Path(sys.argv[2])
    site.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(site))  # what an earlier run has installed is there
    wheels = missing(folder.glob("*.whl"))
    print(f"unpack: {len(wheels)} distributions to install into {site}")
    if wheels:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
        flags = ["--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target", str(site)]
        status = subprocess.run([*pip, *flags, *map(str, wheels)], check=False).returncode
        # vLLM alone takes 30 s to compile, again in each of its processes
        subprocess.run([sys.executable, "-m", "compileall", "-q", "-q", "-j", "0", str(site)], check=False)
        raise SystemExit(status)


if __name__ == "__main__":
    main()
