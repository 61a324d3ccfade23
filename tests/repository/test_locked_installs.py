"""Set-up, releases and images install packages of the lock files only.

deploy/pin_images knows every image.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.containerfiles import CONTAINERFILES, bases, instructions

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    ROOT / name for name in ("scripts/setup", "scripts/uv", "deploy/container/install_beside")
]
# pip and uv check hashes, or have no index.
SAFE = ("--require-hashes", "--no-index")
# Installs without a lock file, and why.
EXCEPTIONS = {
    'pip install --no-compile "${index[@]}" "${choice[@]}"': (
        "torch: its build, and so its hash, depends on the machine; scripts/pick_torch chooses it"
    ),
    'pip install --python "$python" --no-deps --build-constraints constraints/build.txt'
    " --editable .": "this folder; uv checks the hashes in the constraints of what builds it",
}
MANIFESTS = [
    path
    for path in sorted((ROOT / "deploy").rglob("*.y*ml"))
    if not {"local", "grafana", "prometheus.yml", "targets"} & set(path.parts)
]


def installs(path: Path) -> list[str]:
    """Return the commands of pip and uv that install or build, each in one line."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text().replace("\\\n", " "), flags=re.MULTILINE)
    found = re.findall(r"(?:pip|uv) (?:install|wheel|build|sync|download)\b[^&|;\n]*", text)
    return [re.sub(r"\s+", " ", command).strip() for command in found]


@pytest.mark.parametrize("path", [*CONTAINERFILES, *SCRIPTS], ids=lambda path: path.name)
def test_installs_take_packages_of_lock_files_only(path: Path) -> None:
    for command in installs(path):
        is_safe = any(flag in command for flag in SAFE)
        assert is_safe or command in EXCEPTIONS, command
        assert "-r " not in command or "--require-hashes" in command


def test_installs_are_found_in_both_kinds_of_files() -> None:
    assert [len(installs(path)) for path in CONTAINERFILES] == [6, 2, 2]
    assert [len(installs(path)) for path in SCRIPTS] == [3, 1, 2]
    named = {command for path in SCRIPTS for command in installs(path)}
    assert named >= EXCEPTIONS.keys()


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_image_has_its_lock_file_in_the_build(path: Path) -> None:
    copied = {rest.split()[0] for word, rest in instructions(path) if word == "COPY"}
    used = re.findall(r"constraints/\S+\.txt", "\n".join(installs(path) + beside(path)))
    assert {name for name in used if name not in copied} == set()
    assert used


def beside(path: Path) -> list[str]:
    """Return the calls of install_beside."""
    runs = [rest for word, rest in instructions(path) if word == "RUN"]
    return [rest for rest in runs if "install_beside" in rest]


@pytest.fixture(scope="module")
def pin_images() -> Any:
    loader = SourceFileLoader("pin_images", str(ROOT / "deploy/pin_images"))
    spec = spec_from_loader("pin_images", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def of_manifest(node: Any) -> Iterator[str]:
    """Yield the images that a compose file or a manifest names."""
    if isinstance(node, dict):
        if isinstance(node.get("image"), str):
            yield node["image"]
        for value in node.values():
            yield from of_manifest(value)
    elif isinstance(node, list):
        for value in node:
            yield from of_manifest(value)


@pytest.mark.parametrize(
    "path", [*CONTAINERFILES, *MANIFESTS], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_every_image_is_one_that_pin_images_finds(path: Path, pin_images: Any) -> None:
    text = path.read_text()
    if path in CONTAINERFILES:
        named = bases(path)
    else:
        named = list(of_manifest(list(yaml.safe_load_all(text))))
    assert set(pin_images.images(text)) == set(named)
