"""What is settled of the installed package before anything is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import cast

import pytest

from dynamo_trtllm.engines.manifests import Presence
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY
from dynamo_trtllm.engines.trtllm.bindings import TrtllmBindings, check_needed, release_line
from dynamo_trtllm.protocol.errors import ConfigError
from tests.kit.cases import each_case
from tests.kit.fake_packages import RELEASES, fake_tensorrt_llm


@pytest.mark.parametrize(
    ("version", "line"),
    [("1.2.1", "1.2"), ("1.3.0rc29", "1.3.0rc29"), ("1.2.1+cu129", "1.2")],
)
def test_line_when_pre_release_then_it_stands_for_itself(version: str, line: str) -> None:
    assert release_line(version) == line


@each_case("owner", sorted(LIBRARY.needed))
def test_needed_name_that_is_gone_prevents_the_start(owner: str) -> None:
    has = {class_name: frozenset(names) for class_name, names in LIBRARY.needed.items()}
    check_needed(has, "1.2.1")
    gone = LIBRARY.needed[owner][0]
    with pytest.raises(ConfigError, match=f"{owner}.{gone}"):
        check_needed({**has, owner: has[owner] - {gone}}, "1.2.1")


@each_case("release", LIBRARY.releases)
def test_needed_names_are_not_known_to_be_absent(release: object) -> None:
    absent = [
        f"{owner}.{name}"
        for owner, names in LIBRARY.needed.items()
        for name in names
        if release.presence(owner, name) is Presence.ABSENT  # type: ignore[attr-defined]
    ]
    assert absent == []


def test_optional_when_release_has_a_name_then_it_is_used() -> None:
    for version in RELEASES:
        with fake_tensorrt_llm(version):
            vendor = TrtllmBindings()
        known = vendor.disagg_fields
        assert ("disagg_request_id" in known) is (version >= "1.3")
        assert known <= {
            *LIBRARY.needed["DisaggregatedParams"],
            *LIBRARY.optional["DisaggregatedParams"],
        }


def test_load_names_the_place_of_a_missing_class() -> None:
    with fake_tensorrt_llm() as package:
        del package.LLM
        import tensorrt_llm.llmapi  # type: ignore[import-not-found, unused-ignore]

        del tensorrt_llm.llmapi.LLM
        with pytest.raises(ConfigError, match=r"no LLM in tensorrt_llm, tensorrt_llm\.llmapi"):
            TrtllmBindings()


async def test_read_of_1_1_ends_when_its_cancel_is_dropped() -> None:
    async def rows(timeout: float) -> AsyncIterator[dict[str, int]]:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(timeout)
        for number in range(3):
            yield {"iter": number}

    llm = SimpleNamespace(get_stats_async=rows)
    read = TrtllmBindings.reader(
        cast("TrtllmBindings", SimpleNamespace(is_since_1_2=False)), llm, "get_stats"
    )
    assert await asyncio.to_thread(read, timeout=0.01) == [{"iter": 0}]
