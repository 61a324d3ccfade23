"""The table of vLLM's patches in the documentation is the one that the modules' records give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_trtllm.engines.vllm import releases
from dynamo_trtllm.engines.vllm.patches.patch import Patch, apply
from dynamo_trtllm.protocol.errors import EngineFailed
from scripts import vllm_patches_reference
from tests.kit.fake_packages import fake_vllm


@pytest.fixture(autouse=True)
def vllm() -> Iterator[None]:
    with fake_vllm():
        yield


def test_page_when_printed_from_the_patches_then_as_it_is() -> None:
    page = vllm_patches_reference.page()
    assert page == vllm_patches_reference.PAGE.read_text(encoding="utf-8"), "run scripts/docs"


def test_page_without_table_names_the_heading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.md").write_text("# Patches\n\ntext\n")
    monkeypatch.setattr(vllm_patches_reference, "PAGE", tmp_path / "page.md")
    with pytest.raises(ValueError, match="no table under a heading 'Patches'"):
        vllm_patches_reference.page()


def patch(*, is_vital: bool) -> Patch:
    return Patch("name", "the fault", "none known", "all", "always", "never", is_vital)


@pytest.mark.parametrize("is_needed", [True, False])
def test_patch_not_needed_by_a_release_is_not_made(is_needed: bool) -> None:
    made: list[str] = []
    assert apply(patch(is_vital=True), lambda: is_needed, lambda: made.append("made")) is is_needed
    assert bool(made) is is_needed


@pytest.mark.parametrize("error", [AttributeError("gone"), TypeError("changed")])
def test_patch_unfit_for_a_release_is_rejected_by_name(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def install() -> None:
        raise error

    with pytest.raises(
        EngineFailed,
        match=r"the patch name does not fit .*Without it, the fault; install a release",
    ):
        apply(patch(is_vital=True), lambda: True, install)
    assert not apply(patch(is_vital=False), lambda: True, install)
    assert "running without the patch name" in caplog.text


def test_patch_of_moved_code_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a release of tomorrow: the class of windows is gone."""
    from dynamo_trtllm.engines.vllm.patches import retained_windows

    monkeypatch.setattr(retained_windows, "_MODULE", "vllm.v1.core.gone")
    with pytest.raises(EngineFailed, match="retained_windows does not fit"):
        retained_windows.install()
    assert releases.PACKAGE.find_optional("SlidingWindowManager", "vllm.v1.core.gone") is None
