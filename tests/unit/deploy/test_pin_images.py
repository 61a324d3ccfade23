"""deploy/pin_images with a registry in place of skopeo, on the files of this repository."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.kit.containerfiles import CONTAINERFILES, bases
from tests.unit.deploy.kustomize import render
from tests.unit.deploy.recipes import RECIPES, ROOT

PROGRAM = ROOT / "deploy" / "pin_images"
# The manifest of an image is its name here. A tag that ends with "missing" does not exist.
SKOPEO = """#!/bin/sh
case "$*" in
    "inspect --raw docker://"*missing) echo "manifest unknown" >&2; exit 1 ;;
    "inspect --raw docker://"*) printf %s "${3#docker://}" ;;
    *) exit 9 ;;
esac
"""
OWN = "image: dynamo-trtllm/frontend:0.1.0\n"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "skopeo").write_text(SKOPEO)
    (programs / "skopeo").chmod(0o755)

    def run(*words: object, text: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, PROGRAM, *words]
        environ = {"PATH": f"{programs}:/usr/bin:/bin"}
        return subprocess.run(
            command, input=text, capture_output=True, text=True, check=False, env=environ
        )

    return run


def pinned(image: str) -> str:
    return f"{image}@sha256:{hashlib.sha256(image.encode()).hexdigest()}"


@pytest.mark.parametrize("source", CONTAINERFILES, ids=lambda path: path.suffix[1:])
def test_bases_of_a_containerfile_get_their_digests(source: Path, run: Run, tmp_path: Path) -> None:
    copy = tmp_path / source.name
    copy.write_text(source.read_text())
    assert run("--check", copy).returncode == 1
    assert run(copy).returncode == 0
    assert bases(copy) == [pinned(image) for image in bases(source)]
    assert run("--check", copy).returncode == 0


def test_images_of_compose_get_their_digests_once(run: Run, tmp_path: Path) -> None:
    copy = tmp_path / "docker-compose.yml"
    copy.write_text((ROOT / "deploy/docker-compose.yml").read_text())
    before = yaml.safe_load(copy.read_text())["services"]
    assert run(copy).returncode == 0
    written = copy.read_text()
    after = yaml.safe_load(written)["services"]
    assert after["nats"]["image"] == pinned(before["nats"]["image"])
    assert after["grafana"]["image"] == before["grafana"]["image"]  # it has one
    assert run("--check", copy).returncode == 0
    assert run(copy).returncode == 0
    assert copy.read_text() == written


@pytest.mark.parametrize(
    "folder", ["platform/overlays/production", "gpt-oss-120b/overlays/agg-production"]
)
def test_rendered_manifests_when_piped_then_all_are_pinned(folder: str, run: Run) -> None:
    text = yaml.safe_dump_all(render(RECIPES / folder))
    assert run("--check", "-", text=text).returncode == 1
    done = run("-", text=text)
    assert (done.returncode, done.stderr) == (0, "")
    assert run("--check", "-", text=done.stdout).returncode == 0
    assert "@sha256:" in done.stdout


@pytest.mark.parametrize("words", [("-",), ("--check", "-")])
def test_own_image_without_a_registry_is_rejected(words: tuple[str, ...], run: Run) -> None:
    """A stranger may own the name on the Docker Hub."""
    done = run(*words, text=OWN)
    assert (done.returncode, done.stdout) == (1, "")
    assert "dynamo-trtllm/frontend:0.1.0 names no registry" in done.stderr


@pytest.mark.parametrize(
    "image", ["nats:2.14.0-alpine", "nats", "nats:2.14.0@sha256:abc", "nats:2@sha512:" + "0" * 64]
)
def test_check_names_an_image_without_a_digest(image: str, run: Run) -> None:
    text = f"image: {pinned('a:1')}\nspec: [{{name: x, image: {image}}}] # image: comment:1\n"
    done = run("--check", "-", text=text)
    assert done.returncode == 1
    assert done.stderr == f"-: {image} has no digest; run deploy/pin_images\n"


def test_file_is_not_written_if_an_image_is_unknown(run: Run, tmp_path: Path) -> None:
    first = tmp_path / "first.yaml"
    second = tmp_path / "second.yaml"
    first.write_text("image: a:1\n")
    second.write_text("image: b:missing\n")
    done = run(first, second)
    assert done.returncode == 1
    assert "b:missing" in done.stderr
    assert "manifest unknown" in done.stderr
    assert first.read_text() == "image: a:1\n"


def test_machine_without_a_resolver_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bin/skopeo").unlink()
    done = run("-", text="image: a:1\n")
    assert done.returncode == 1
    assert "install skopeo, or docker with buildx" in done.stderr
