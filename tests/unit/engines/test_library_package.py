"""A library that an engine wraps: what is said when it, a module of it or a name is missing or
broken.
"""

import importlib.metadata
from pathlib import Path

import pytest

from dynamo_trtllm.engines.external.library import LibraryPackage
from dynamo_trtllm.protocol.errors import ConfigError

PACKAGE = LibraryPackage(
    engine="some",
    library="Some",
    releases="2.0",
    module="some_library",
    distributions=("some",),
    install="get it",
)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an importable `some_library`."""
    folder = tmp_path / "some_library"
    folder.mkdir()
    (folder / "__init__.py").write_text("__version__ = '2.1'\n")
    (folder / "broken.py").write_text("import some_missing_dependency\n")
    (folder / "names.py").write_text("Name = 'found'\n")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_version_when_not_installed_then_what_to_install() -> None:
    assert not PACKAGE.is_installed()
    with pytest.raises(ConfigError, match=r"^the some engine needs Some 2\.0; get it$") as caught:
        PACKAGE.version()
    assert caught.value.field == "engine"


def test_version_when_metadata_is_missing_then_the_packages_own(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PACKAGE.version() == "2.1"
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.2")
    assert PACKAGE.version() == "2.2"


def test_find_tries_the_next_module_when_one_is_missing(library: Path) -> None:
    assert (
        PACKAGE.find("Name", "some_library.gone.deep", "some_library", "some_library.names")
        == "found"
    )
    assert PACKAGE.find_optional("Name", "some_library.gone") is None
    with pytest.raises(
        ConfigError, match=r"Some has no Other in some_library\.names; install Some 2\.0"
    ):
        PACKAGE.find("Other", "some_library.names")


def test_find_when_a_module_can_not_be_imported_then_the_reason(library: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"Some can't be imported \(No module named 'some_missing_dependency'\)"
    ):
        PACKAGE.find("Name", "some_library.broken", "some_library.names")
