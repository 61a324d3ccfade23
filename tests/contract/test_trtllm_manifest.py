"""Every call, argument and attribute of TensorRT-LLM that the adapter uses, held against each
release's manifest.

The names are recorded while requests run over the stand-in of each release. Absent fails; what was
not read passes and is on docs/trtllm-not-read.md.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from dynamo_trtllm.engines.manifests import ApiManifest, Presence
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY, release_for
from dynamo_trtllm.protocol.errors import EngineError
from dynamo_trtllm.protocol.messages import OutputFormat, Role, StructuredOutput
from dynamo_trtllm.protocol.streams import as_stream
from dynamo_trtllm.testing.engine_requests import ask, check_stats, collect, prompt_of, started
from tests.kit.engines import answer, make, prefill_then_decode
from tests.kit.fake_packages import RELEASES, fake_tensorrt_llm, shorten_waits
from tests.kit.trtllm_api_usage import Uses, record_usage
from tests.kit.trtllm_unverified_names import RESULTS
from tests.kit.waiting import SOON_S

PROMPT = prompt_of(40)
TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"
# Each request uses what the others don't; one that the played release refuses is refused before it
# touches a name.
SAMPLINGS = [
    {"logprobs": 2},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": 3},
    {"stop_token_ids": (7,), "ignore_eos": True},
    {"min_tokens": 2},
    {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    {"logit_bias": ((9, 1000.0),), "stop_token_ids": (9,)},
    {"guided": StructuredOutput(alternatives=(OutputFormat(json_schema="{}"),))},
    {"guided": StructuredOutput(alternatives=(OutputFormat(json_schema='{"type":"object"}'),))},
    {"guided": StructuredOutput(alternatives=(OutputFormat(json_schema="{}", prefix="x"),))},
]
SCHEDULED_ARGS = {
    "scheduler_config": {"waiting_queue_policy": "priority"},
    "attention_dp_config": {"kv_cache_routing_conversation_affinity": True},
}
PLAIN_ARGS = {"guided_decoding_backend": "xgrammar"}


def sampler_args(release: ApiManifest) -> dict[str, object]:
    """The sampler that takes penalties, where the release has a choice, and the times of
    requests.
    """
    wanted = {"sampler_type": "TRTLLMSampler", "return_perf_metrics": True}
    has = {
        name: v
        for name, v in wanted.items()
        if release.presence("TorchLlmArgs", name) is Presence.PRESENT
    }
    return PLAIN_ARGS | has


async def record(version: str, folder: Path) -> Uses:
    uses: Uses = set()
    with fake_tensorrt_llm(version) as package, record_usage(package, uses):
        args = sampler_args(release_for(version))
        roles = (Role.AGGREGATED, Role.PREFILL, Role.DECODE)
        is_newest = package.standin.release.LINE >= (1, 3)
        events = {"kv_cache_config": {"event_buffer_max_size": 64}}
        ranks = (
            events
            | {"enable_attention_dp": True, "tensor_parallel_size": 2}
            | (SCHEDULED_ARGS if is_newest else {})
        )
        more = {Role.AGGREGATED: ranks}
        aggregated, prefill, decode = (
            make("trtllm", folder, role, **args, **more.get(role, {})) for role in roles
        )
        async with started(aggregated, prefill, decode):
            for sampling in SAMPLINGS:
                try:
                    await answer(aggregated, PROMPT, **sampling)
                except EngineError as exc:
                    print(f"{version}: {exc}")
            logprobs = {"logprobs": 1} if is_newest else {}  # rejected before
            timings = (await prefill_then_decode(prefill, decode, PROMPT, **logprobs))[-1].stats
            assert timings is not None
            assert set(timings.more) == (
                {"submit", "first_token"} if "return_perf_metrics" in args else set()
            )
            salted = msgspec.structs.replace(ask(PROMPT), cache_salt="s")
            await collect(aggregated, salted)
            fields = {
                "dp_rank": 1,
                "conversation_id": "c",
                "priority": int(is_newest),
                "traceparent": TRACEPARENT,
            }
            placed = msgspec.structs.replace(ask(PROMPT), **fields)
            await collect(aggregated, placed)
            async with aclosing(as_stream(aggregated, ask(PROMPT, max_tokens=300))) as stream:
                await anext(stream)
            assert aggregated.sleep_obstacle
            aggregated.start_kv_events(lambda events: None)
            await aggregated.check()
            aggregated.stats()
            await check_stats(aggregated, running=0)
            form = "" if version >= "1.2" else "_async"
            reads = {
                (f"LLM.{name}{form}", "timeout") for name in ("get_stats", "get_kv_cache_events")
            }
            async with asyncio.timeout(SOON_S):
                while not reads <= uses:  # noqa: ASYNC110  # a poll of the statistics, on a thread
                    await asyncio.sleep(0.01)
    return uses


@pytest.fixture(scope="module")
def uses(gpt_oss: Path) -> dict[str, Uses]:
    with pytest.MonkeyPatch.context() as patched:
        shorten_waits(patched)
        return {version: asyncio.run(record(version, gpt_oss)) for version in RELEASES}


def is_public(name: str) -> bool:
    return not name.startswith("_")


def absent(found: Iterable[tuple[str, str]], release: ApiManifest) -> list[str]:
    """Names that the release is known not to have. Manifests are of public names."""
    named = [(owner, name) for owner, name in found if is_public(name)]
    return [
        f"{owner}.{name}"
        for owner, name in named
        if release.presence(owner, name) is Presence.ABSENT
    ]


def without(release: ApiManifest, owner: str, name: str) -> ApiManifest:
    """The release as if the name had been renamed in it."""
    fields = {key: field for key, field in release.owners.get(owner, {}).items() if key != name}
    owners = {key: value for key, value in release.owners.items() if key != f"{owner}.{name}"}
    renamed = copy.copy(release)
    renamed.owners = {**owners, owner: {**fields, "renamed": next(iter(fields.values()), None)}}  # type: ignore[dict-item]
    renamed.not_read = release.not_read - {f"{owner} in part"}
    renamed.members = release.members - {f"{owner}.{name}"}
    return renamed


@pytest.mark.parametrize("version", RELEASES)
def test_names_when_used_then_no_release_lacks_them(version: str, uses: dict[str, Uses]) -> None:
    release = release_for(version)
    for owner, name in sorted(uses[version]):
        if release.presence(owner, name) is Presence.NOT_READ:
            print(f"not read: {version} {owner}.{name}")
    assert absent(uses[version], release) == []


@pytest.mark.parametrize("version", RELEASES)
def test_names_when_one_present_is_renamed_then_it_is_found(
    version: str, uses: dict[str, Uses]
) -> None:
    release = release_for(version)
    present = [use for use in uses[version] if release.presence(*use) is Presence.PRESENT]
    assert len(present) > 25
    for owner, name in present:
        assert absent(uses[version], without(release, owner, name)) == [f"{owner}.{name}"]


def test_recorded_names_are_those_the_adapter_uses(uses: dict[str, Uses]) -> None:
    """So that its check at start, and the page of what was not read, miss nothing and name nothing
    that is unused.
    """
    said = {
        (owner, name)
        for table in (LIBRARY.needed, LIBRARY.optional, RESULTS)
        for owner, names in table.items()
        for name in names
    }
    touched = {
        (owner, name) for found in uses.values() for owner, name in found if owner != "TorchLlmArgs"
    }
    methods = {("LLM", owner.partition(".")[2]) for owner, _ in touched if owner.startswith("LLM.")}
    assert touched | methods == said


def test_recorded_arguments_exist_in_every_release(uses: dict[str, Uses]) -> None:
    for version, found in uses.items():
        added = {name for owner, name in found if owner == "TorchLlmArgs"}
        assert {"model", "backend", "enable_iter_perf_stats"} <= added
        release = release_for(version)
        assert [
            name for name in added if release.presence("TorchLlmArgs", name) is not Presence.PRESENT
        ] == []
