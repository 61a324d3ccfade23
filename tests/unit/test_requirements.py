"""This project installs with each supported release of TensorRT-LLM and vLLM, by their recorded metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.package_index import (
    EXTRA_OF,
    OURS,
    PACKAGES,
    RELEASES,
    VERSION,
    NoSolution,
    project,
    resolve_with_pip,
    resolve_with_uv,
    write_index,
)

RECORDED = [pytest.param(release, id=f"{release['name']}-{release['version']}") for release in RELEASES]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    write_index(folder, project())
    return folder


def planted(folder: Path, requirement: str) -> Path:
    """Write an index in which this project has another requirement of a package."""
    name = Requirement(requirement).name
    own = project()
    own["dependencies"] = [requirement if Requirement(text).name == name else text for text in own["dependencies"]]
    assert requirement in own["dependencies"]
    write_index(folder, own)
    return folder


def wanted(release: Mapping[str, Any]) -> tuple[str, str]:
    """Return the arguments of `pip install` for a release, as docs/trtllm.md has them."""
    library, version = release["name"], release["version"]
    return f"{OURS}[{EXTRA_OF[library]},local]", f"{library}=={version}"


def test_releases_when_listed_then_those_that_are_supported() -> None:
    named = [f"{release['name']} {release['version']}" for release in RELEASES]
    assert named == [
        "tensorrt-llm 1.1.0",
        "tensorrt-llm 1.2.1",
        "tensorrt-llm 1.3.0rc29",
        "tensorrt-llm 1.4.0rc1",
        "vllm 0.24.0",
    ]


@pytest.mark.parametrize("release", RECORDED)
def test_project_when_installed_with_a_release_then_it_resolves(index: Path, release: Mapping[str, Any]) -> None:
    chosen = resolve_with_uv(index, *wanted(release))
    assert chosen[release["name"]] == release["version"]
    for requirement in map(Requirement, release["requires_dist"]):
        version = chosen.get(canonicalize_name(requirement.name))
        assert version is None or requirement.specifier.contains(version, prereleases=True)


@pytest.mark.parametrize("resolve", [resolve_with_pip, resolve_with_uv])
def test_project_when_no_release_is_named_then_the_newest_that_is_no_candidate(index: Path, resolve: Any) -> None:
    assert resolve(index, f"{OURS}[trtllm,local]")["tensorrt-llm"] == "1.2.1"


@pytest.mark.parametrize("requirement", ["openai-harmony>=0.0.8", "huggingface-hub>=1", "tokenizers>=0.23"])
def test_project_when_a_range_is_too_narrow_then_it_does_not_resolve(tmp_path: Path, requirement: str) -> None:
    with pytest.raises(NoSolution, match=Requirement(requirement).name):
        resolve_with_uv(planted(tmp_path, requirement), f"{OURS}[trtllm,local]", "tensorrt-llm==1.2.1")


def beside(index: Path, release: Mapping[str, Any]) -> dict[str, str]:
    """Return what is chosen beside an image, whose packages keep their versions. Raise NoSolution."""
    extra = "[vllm]" if release["name"] == "vllm" else ""  # as the Containerfiles have it
    image = {**release["image"], release["name"]: release["version"]}
    return resolve_with_uv(index, f"{OURS}{extra}", constraints=image)


@pytest.mark.parametrize("release", RECORDED)
def test_project_when_installed_beside_an_image_then_it_replaces_no_package(
    index: Path, release: Mapping[str, Any]
) -> None:
    chosen = beside(index, release)
    assert chosen[OURS] == VERSION
    assert {name: chosen[name] for name in release["image"] if name in chosen}.items() <= release["image"].items()


@pytest.mark.parametrize("requirement", ["pydantic>=2.14", "xxhash>=4", "openai-harmony>=0.0.8"])
def test_project_when_a_range_leaves_out_what_an_image_has_then_it_does_not_resolve(
    tmp_path: Path, requirement: str
) -> None:
    (release,) = [found for found in RELEASES if found["version"] == "1.2.1"]
    with pytest.raises(NoSolution, match=Requirement(requirement).name):
        beside(planted(tmp_path, requirement), release)


def test_dependencies_when_listed_then_all_are_recorded() -> None:
    extras = project()["optional-dependencies"]
    listed = [*project()["dependencies"], *extras["trtllm"], *extras["vllm"], *extras["local"]]
    names = {canonicalize_name(Requirement(text).name) for text in listed}
    assert names - EXTRA_OF.keys() <= PACKAGES.keys(), "run scripts/record_pins"


@pytest.mark.parametrize("release", RECORDED)
def test_release_when_it_pins_transformers_then_the_torch_engine_accepts_it(release: Mapping[str, Any]) -> None:
    (ours,) = [text for text in project()["optional-dependencies"]["torch"] if text.startswith("transformers")]
    (theirs,) = [text for text in release["requires_dist"] if text.startswith("transformers")]
    for specifier in Requirement(theirs).specifier:
        assert specifier.operator in ("==", ">=")
        assert Requirement(ours).specifier.contains(specifier.version)
