"""Write the bill of materials and the licenses of a release.

Run it as `python -m scripts.materials FOLDER VERSION`; scripts/release does. It writes to FOLDER:

  sbom.cdx.json             the locked packages of set-up and images (CycloneDX), and torch
  THIRD_PARTY_LICENSES.txt  their licenses

The licenses and their texts are those in the metadata of the installed packages. It needs no
network.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ("demo.txt", "bench.txt")
# Packages whose metadata names no license: the license of the text that they contain.
UNDECLARED = {"fastokens": "Apache-2.0", "openai-harmony": "Apache-2.0"}
_CLASSIFIER = "License :: OSI Approved :: "
_LICENSE_FILES = ("LICEN", "COPYING", "NOTICE")  # the beginnings of the names of license files


class LicenseError(Exception):
    """The license of a package is not known, or another version of it is installed."""


def locked_packages() -> str:
    """Return the requirements of this system with hashes, except torch, which has a range."""
    entries: dict[str, str] = {}
    for lock in LOCKS:
        text = (ROOT / "constraints" / lock).read_text(encoding="utf-8")
        for entry in re.findall(r"^[a-z0-9].*(?:\n +--hash.*)+", text, re.MULTILINE):
            requirement = Requirement(entry.partition("\\")[0])
            if requirement.marker is None or requirement.marker.evaluate():
                entries[requirement.name] = entry
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    torch = [text for text in project["optional-dependencies"]["torch"] if text.startswith("torch")]
    return "\n".join([*entries.values(), *torch]) + "\n"


def bill_of_materials(version: str) -> dict[str, Any]:
    """Return the packages in the form of CycloneDX."""
    command = [sys.executable, "-m", "cyclonedx_py", "requirements", "--pyproject"]
    command += ["pyproject.toml", "--mc-type", "library", "--output-reproducible", "-"]
    done = subprocess.run(
        command, cwd=ROOT, input=locked_packages(), capture_output=True, text=True, check=True
    )
    content: dict[str, Any] = json.loads(done.stdout)
    # The version is not in pyproject.toml, from which the other values are.
    content["metadata"]["component"]["version"] = version
    return content


def license_of(distribution: Distribution) -> str:
    """Return the license that the metadata of a package names."""
    metadata = distribution.metadata
    name = metadata["Name"]
    expression = metadata.get("License-Expression")
    if expression:
        return str(expression)
    classifiers = metadata.get_all("Classifier") or []
    named = [text.removeprefix(_CLASSIFIER) for text in classifiers if text.startswith(_CLASSIFIER)]
    if named:
        return " OR ".join(named)
    declared = (metadata.get("License") or "").strip()
    if declared and "\n" not in declared:
        return str(declared)
    if name in UNDECLARED:
        return UNDECLARED[name]
    raise LicenseError(f"{name} names no license; read its files, and add it to UNDECLARED")


def texts_of(distribution: Distribution) -> Iterator[str]:
    """Yield the license files in the metadata of a package."""
    for path in sorted(distribution.files or (), key=str):
        is_metadata = ".dist-info" in path.parts[0]
        if is_metadata and path.name.upper().startswith(_LICENSE_FILES):
            yield distribution.locate_file(path).read_text(encoding="utf-8", errors="replace")


def add_license(component: dict[str, Any]) -> str:
    """Add the license to a component of a bill of materials, and return its section of the texts.

    Raises:
        LicenseError: the package is not installed in this version, or names no license.
    """
    name = component["name"]
    version = component.get("version", "")
    try:
        distribution = importlib.metadata.distribution(name)
    except PackageNotFoundError:
        raise LicenseError(f"{name} is not installed; run scripts/setup --dev") from None
    if version and distribution.version != version:
        raise LicenseError(
            f"{name} {distribution.version} is installed instead of {version}; run"
            " scripts/setup --dev"
        )
    license_name = license_of(distribution)
    component["licenses"] = [{"license": {"name": license_name}}]
    heading = f"{'=' * 80}\n{name} {version}".rstrip() + f"\nLicense: {license_name}"
    return "\n\n".join((heading, *map(str.strip, texts_of(distribution))))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.materials",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder of the release")
    parser.add_argument("version", metavar="VERSION", help="version of the release")
    args = parser.parse_args()
    content = bill_of_materials(args.version)
    try:
        sections = [add_license(component) for component in content["components"]]
    except LicenseError as error:
        print(f"materials: {error}", file=sys.stderr)
        return 1
    materials = json.dumps(content, indent=2) + "\n"
    (args.folder / "sbom.cdx.json").write_text(materials, encoding="utf-8")
    licenses = "\n\n".join(sections) + "\n"
    (args.folder / "THIRD_PARTY_LICENSES.txt").write_text(licenses, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
