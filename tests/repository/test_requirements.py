"""This project installs with each supported release of TensorRT-LLM and vLLM, by their recorded
metadata.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.kit.package_index import (
    EXTRA_OF,
    OURS,
    PACKAGES,
    RELEASES,
    ROOT,
    VERSION,
    NoSolution,
    project,
    resolve_with_pip,
    resolve_with_uv,
    write_index,
)

RECORDED = [
    pytest.param(release, id=f"{release['name']}-{release['version']}") for release in RELEASES
]
VLLM = {release["version"]: release for release in RELEASES if release["name"] == "vllm"}
NEWEST_VLLM = max(VLLM, key=Version)
VLLM_EXTRAS = ("vllm", "vllm,torch")
RESOLVERS = [pytest.param(resolve_with_pip, id="pip"), pytest.param(resolve_with_uv, id="uv")]
# pip takes seconds for each resolution. The tests below that use RESOLVERS show that it resolves as
# uv does.
UV_ELSE_LONG = [pytest.param(resolve_with_pip, id="pip", marks=pytest.mark.long), RESOLVERS[1]]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    write_index(folder, project())
    return folder


def planted(folder: Path, requirement: str, extra: str | None = None) -> Path:
    """Write an index in which this project, or an extra, has another requirement of a package."""
    name = Requirement(requirement).name
    own = project()
    table, key = (own["optional-dependencies"], extra) if extra else (own, "dependencies")
    table[key] = [requirement if Requirement(text).name == name else text for text in table[key]]
    assert requirement in table[key]
    write_index(folder, own)
    return folder


def wanted(release: Mapping[str, Any]) -> tuple[str, str]:
    """Return the arguments of `pip install` for a release, as docs/trtllm.md has them."""
    library = release["name"]
    version = release["version"]
    return f"{OURS}[{EXTRA_OF[library]},local,cli,hub]", f"{library}=={version}"


def test_releases_when_listed_then_those_that_are_supported() -> None:
    named = [f"{release['name']} {release['version']}" for release in RELEASES]
    assert named == [
        "tensorrt-llm 1.1.0",
        "tensorrt-llm 1.2.1",
        "tensorrt-llm 1.3.0rc29",
        "tensorrt-llm 1.4.0rc1",
        "vllm 0.24.0",
        "vllm 0.32.0",
        "vllm 0.33.0",
    ]


@pytest.mark.parametrize("release", RECORDED)
def test_project_when_installed_with_a_release_then_it_resolves(
    index: Path, release: Mapping[str, Any]
) -> None:
    chosen = resolve_with_uv(index, *wanted(release))
    assert chosen[release["name"]] == release["version"]
    for requirement in map(Requirement, release["requires_dist"]):
        if requirement.marker and not requirement.marker.evaluate():
            continue
        version = chosen.get(canonicalize_name(requirement.name))
        assert version is None or requirement.specifier.contains(version, prereleases=True)


@pytest.mark.parametrize("resolve", UV_ELSE_LONG)
def test_project_without_release_resolves_newest_stable(index: Path, resolve: Any) -> None:
    assert resolve(index, f"{OURS}[trtllm,local]")["tensorrt-llm"] == "1.2.1"


@pytest.mark.parametrize("resolve", UV_ELSE_LONG)
@pytest.mark.parametrize("extras", VLLM_EXTRAS)
@pytest.mark.parametrize("version", VLLM)
def test_vllm_named_release_is_chosen_with_its_pins(
    index: Path, version: str, extras: str, resolve: Any
) -> None:
    chosen = resolve(index, f"{OURS}[{extras}]", f"vllm=={version}")
    assert chosen["vllm"] == version
    assert f"torch=={chosen['torch']}" in VLLM[version]["requires_dist"]
    requires = VLLM[version]["requires_dist"]
    (transformers,) = [text for text in requires if text.startswith("transformers")]
    assert Requirement(transformers).specifier.contains(chosen["transformers"])


@pytest.mark.parametrize("resolve", RESOLVERS)
@pytest.mark.parametrize("extras", VLLM_EXTRAS)
def test_vllm_when_not_pinned_then_the_newest(index: Path, extras: str, resolve: Any) -> None:
    """Where a range of ours excludes what the newest one pins, resolvers silently take an older."""
    assert resolve(index, f"{OURS}[{extras}]")["vllm"] == NEWEST_VLLM


@pytest.mark.parametrize("resolve", UV_ELSE_LONG)
def test_vllm_without_its_torch_resolves_older_release(tmp_path: Path, resolve: Any) -> None:
    """The test above can fail: with this range, extra torch brought back vLLM 0.32.0."""
    narrow = planted(tmp_path, "torch>=2.11,<2.14", extra="torch")
    assert resolve(narrow, f"{OURS}[vllm]")["vllm"] == NEWEST_VLLM
    assert resolve(narrow, f"{OURS}[vllm,torch]")["vllm"] == "0.32.0"
    with pytest.raises(NoSolution, match="torch"):
        resolve(narrow, f"{OURS}[vllm,torch]", f"vllm=={NEWEST_VLLM}")


@pytest.mark.parametrize("version", VLLM)
def test_vllm_when_installed_then_these_harmony_packages(index: Path, version: str) -> None:
    """Where there are two, the one that is installed last provides the module."""
    both = {"openai-harmony", "oss-harmony"}
    expected = {"0.24.0": {"openai-harmony"}, "0.32.0": both, "0.33.0": both}
    chosen = resolve_with_uv(index, f"{OURS}[vllm,torch]", f"vllm=={version}")
    assert chosen.keys() & both == expected[version]


@pytest.mark.parametrize("script", ["lock", "pick_torch"])
def test_scripts_use_torch_range_of_the_extra(script: str) -> None:
    extra = project()["optional-dependencies"]["torch"]
    (ours,) = [text for text in extra if text.startswith("torch")]
    assert f'"{ours}"' in (ROOT / "scripts" / script).read_text()


@pytest.mark.parametrize(
    ("requirement", "extra"),
    [("openai-harmony>=0.0.8", None), ("huggingface-hub>=1", "hub"), ("tokenizers>=0.23", None)],
)
def test_project_with_narrow_range_does_not_resolve(
    tmp_path: Path, requirement: str, extra: str | None
) -> None:
    with pytest.raises(NoSolution, match=Requirement(requirement).name):
        resolve_with_uv(
            planted(tmp_path, requirement, extra),
            f"{OURS}[trtllm,local,hub]",
            "tensorrt-llm==1.2.1",
        )


def beside(index: Path, release: Mapping[str, Any]) -> dict[str, str]:
    """Return what is chosen beside an image, whose packages keep their versions.

    Raise NoSolution.
    """
    extra = "[vllm]" if release["name"] == "vllm" else ""  # as the Containerfiles have it
    image = {**release["image"], release["name"]: release["version"]}
    return resolve_with_uv(index, f"{OURS}{extra}", constraints=image)


@pytest.mark.parametrize("release", RECORDED)
def test_project_beside_an_image_replaces_no_package(
    index: Path, release: Mapping[str, Any]
) -> None:
    chosen = beside(index, release)
    assert chosen[OURS] == VERSION
    assert {name: chosen[name] for name in release["image"] if name in chosen}.items() <= release[
        "image"
    ].items()


@pytest.mark.parametrize("release", RECORDED)
def test_locked_packages_fit_beside_an_image(index: Path, release: Mapping[str, Any]) -> None:
    """deploy/container/install_beside installs those that the image lacks."""
    text = (ROOT / "constraints" / "beside.txt").read_text()
    locked = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))
    missing = {
        name: version
        for name, version in locked.items()
        if name not in release["image"] and version in PACKAGES[name]
    }
    assert {"fastokens", "nats-py", "orjson"} & missing.keys()
    chosen = beside(index, {**release, "image": {**release["image"], **missing}})
    assert missing.items() <= chosen.items()


@pytest.mark.parametrize("requirement", ["pydantic>=2.14", "xxhash>=4", "openai-harmony>=0.0.8"])
def test_project_range_that_excludes_image_does_not_resolve(
    tmp_path: Path, requirement: str
) -> None:
    (release,) = [found for found in RELEASES if found["version"] == "1.2.1"]
    with pytest.raises(NoSolution, match=Requirement(requirement).name):
        beside(planted(tmp_path, requirement), release)


def test_dependencies_when_listed_then_all_are_recorded() -> None:
    extras = project()["optional-dependencies"]
    used = ("trtllm", "vllm", "torch", "local", "cli", "hub")
    listed = [*project()["dependencies"], *(text for extra in used for text in extras[extra])]
    names = {canonicalize_name(Requirement(text).name) for text in listed}
    assert names - EXTRA_OF.keys() <= PACKAGES.keys(), "run scripts/record_pins"


@pytest.mark.parametrize("release", RECORDED)
def test_torch_engine_accepts_pinned_transformers(release: Mapping[str, Any]) -> None:
    (ours,) = [
        text
        for text in project()["optional-dependencies"]["torch"]
        if text.startswith("transformers")
    ]
    (theirs,) = [text for text in release["requires_dist"] if text.startswith("transformers")]
    lowest = [found for found in Requirement(theirs).specifier if found.operator in ("==", ">=")]
    assert lowest
    for specifier in lowest:
        assert Requirement(ours).specifier.contains(specifier.version)
