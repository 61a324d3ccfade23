"""A folder of wheels that have only metadata, made from tests/data/requirements, from which pip and
uv can resolve.

It has the supported releases of TensorRT-LLM and vLLM, and all packages that this project needs. A
requirement of a package that the folder does not have is left out: any version would satisfy it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "requirements"
RELEASES = tuple(json.loads(path.read_text()) for path in sorted(DATA.glob("*-*.json")))
PACKAGES: Mapping[str, Mapping[str, list[str]]] = json.loads((DATA / "packages.json").read_text())
EXTRA_OF = {"tensorrt-llm": "trtllm", "vllm": "vllm"}
OURS = "dynamo-trtllm"
VERSION = "0"
NO_PIP_CONFIGURATION = {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


class NoSolution(Exception):
    """No set of packages fits. The message is that of the resolver."""


def project() -> dict[str, Any]:
    """Return the table [project] of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def write_index(folder: Path, own: Mapping[str, Any]) -> None:
    """Write the wheels, and one of this project with the dependencies of `own`."""
    known = {*PACKAGES, *EXTRA_OF}
    for name, versions in PACKAGES.items():
        for version, requires in versions.items():
            write_wheel(folder, name, version, _of(known, requires))
    for release in RELEASES:
        requires = [
            *release["requires_dist"],
            *(text for texts in release["via"].values() for text in texts),
        ]
        write_wheel(folder, release["name"], release["version"], _of(known, requires))
    requires = list(own["dependencies"])
    extras = ("trtllm", "vllm", "torch", "local", "cli", "hub")
    for extra in extras:
        requires += [f"{text}; extra == '{extra}'" for text in own["optional-dependencies"][extra]]
    write_wheel(folder, OURS, VERSION, requires, extras)


def _of(known: set[str], requirements: Iterable[str]) -> list[str]:
    """Return the requirements of known packages, without their extras, which the wheels do not
    have.
    """
    found = []
    for requirement in map(Requirement, requirements):
        if canonicalize_name(requirement.name) in known:
            requirement.extras.clear()
            found.append(str(requirement))
    return found


def write_wheel(
    folder: Path, name: str, version: str, requires: Iterable[str], extras: Iterable[str] = ()
) -> None:
    """Write a wheel without modules."""
    base = f"{name.replace('-', '_')}-{version}"
    info = f"{base}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Provides-Extra: {extra}" for extra in extras]
    lines += [f"Requires-Dist: {text}" for text in requires]
    files = {
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{base}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


def write_image(folder: Path, release: Mapping[str, Any]) -> None:
    """Write the metadata of what an image of a release has, as Python finds it in a folder of
    installed packages.
    """
    for name, version in release["image"].items():
        _write_installed(folder, name, version)
    _write_installed(folder, release["name"], release["version"], release["requires_dist"])


def _write_installed(folder: Path, name: str, version: str, requires: Iterable[str] = ()) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {text}" for text in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "RECORD").write_text("")


def pip_environment() -> dict[str, str]:
    """Return the environment without settings for pip and uv of this machine."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "UV_", "PYTHONPATH"))
    }
    return kept | NO_PIP_CONFIGURATION


def resolve_with_pip(index: Path, *wanted: str) -> dict[str, str]:
    """Return the versions that pip chooses. Raise NoSolution."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--ignore-installed",
        "--no-index",
    ]
    command += ["--find-links", str(index), "--report", "-", *wanted]
    done = subprocess.run(
        command, capture_output=True, text=True, env=pip_environment(), check=False
    )
    if done.returncode != 0:
        raise NoSolution(done.stderr)
    chosen = [entry["metadata"] for entry in json.loads(done.stdout)["install"]]
    return {canonicalize_name(metadata["name"]): metadata["version"] for metadata in chosen}


def resolve_with_uv(
    index: Path, *wanted: str, constraints: Mapping[str, str] = {}
) -> dict[str, str]:
    """Return the versions that uv chooses. Raise NoSolution.

    Args:
        index: folder of wheels.
        wanted: requirements.
        constraints: the only acceptable versions of these packages.
    """
    pinned = index / "constraints.txt"
    pinned.write_text("".join(f"{name}=={version}\n" for name, version in constraints.items()))
    command = [
        str(ROOT / "scripts" / "uv"),
        "pip",
        "compile",
        "-",
        "--quiet",
        "--no-annotate",
        "--no-header",
    ]
    command += ["--python", sys.executable, "--no-cache", "--no-index", "--find-links", str(index)]
    done = subprocess.run(
        [*command, "--constraint", str(pinned)],
        input="\n".join(wanted),
        capture_output=True,
        text=True,
        env=pip_environment() | {"UV_DEFAULT_INDEX": index.as_uri()},
        check=False,
    )
    if done.returncode != 0:
        raise NoSolution(done.stderr)
    chosen = {}
    for line in done.stdout.splitlines():
        name, _, version = line.partition(" ;")[0].strip().partition("==")
        chosen[name] = version
    return chosen
