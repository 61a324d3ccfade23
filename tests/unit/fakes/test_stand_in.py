"""The stand-in does what TensorRT-LLM was read to do.

Engines: one tiny model, a hundred milliseconds each.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.engines.trtllm.api_manifests import release_for
from tests.gpu.trtllm import probes, report
from tests.gpu.trtllm.signatures import differences
from tests.kit.fake_packages import RELEASES, fake_tensorrt_llm
from tests.kit.tiny_models import save_tiny_gpt_oss

PROMPT = list(range(10, 60))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gpt_oss(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def trt() -> Iterator[Any]:
    with fake_tensorrt_llm() as package:
        yield package


def make(package: Any, tiny: Path, **args: Any) -> Any:
    given = {"skip_tokenizer_init": True, "cache_transceiver_config": {"backend": "UCX"}}
    return package.LLM(str(tiny), **{**given, "enable_iter_perf_stats": True, **args})


@pytest.fixture
async def llm(trt: Any, tiny: Path) -> AsyncIterator[Any]:
    made = await asyncio.to_thread(make, trt, tiny)
    yield made
    await asyncio.to_thread(made.shutdown)


def sampling(package: Any, **more: Any) -> Any:
    return package.SamplingParams(
        **{"end_id": 1, "max_tokens": 8, "temperature": 0.0, "detokenize": False, **more}
    )


async def context(package: Any, llm: Any, **more: Any) -> Any:
    params = package.DisaggregatedParams(request_type="context_only")
    return await llm.generate_async(PROMPT, sampling(package, **more), disaggregated_params=params)


def decode_params(package: Any, answered: Any, **more: Any) -> Any:
    names = ("first_gen_tokens", "ctx_request_id", "opaque_state", "draft_tokens")
    fields = {name: getattr(answered, name) for name in names} | more
    return package.DisaggregatedParams(request_type="generation_only", **fields)


def test_import_when_done_then_it_says_that_it_is_a_stand_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING), fake_tensorrt_llm("1.1.0") as package:
        # an earlier test may have imported it
        importlib.reload(package)
        assert package.__version__ == "1.1.0+standin"
    assert "STAND-IN: this is not TensorRT-LLM" in caplog.text


@pytest.mark.parametrize("version", RELEASES)
def test_names_of_played_release_equal_its_manifest(version: str) -> None:
    release = release_for(version)
    with fake_tensorrt_llm(version) as package:
        assert set(inspect.signature(package.SamplingParams).parameters) - {
            "_stop_word_ids"
        } == set(release.fields("SamplingParams"))
        assert list(inspect.signature(package.DisaggregatedParams).parameters) == list(
            release.fields("DisaggregatedParams")
        )
        assert list(inspect.signature(package.LLM.generate_async).parameters) == [
            "self",
            *release.fields("LLM.generate_async"),
        ]
        with pytest.raises(TypeError):
            package.DisaggregatedParams("context_only")
        with pytest.raises(AttributeError):
            package.DisaggregatedParams().unknown = 1


@pytest.mark.parametrize(
    ("version", "args", "key"),
    [
        ("1.2.1", {"frobnicate": 1}, "frobnicate"),
        ("1.2.1", {"kv_cache_config": {"disk_cache_size": 32}}, "kv_cache_config.disk_cache_size"),
        (
            "1.1.0",
            {"cache_transceiver_config": {"kv_transfer_timeout_ms": 1}},
            "kv_transfer_timeout_ms",
        ),
        ("1.2.1", {"moe_config": {"backend": "MARLIN"}}, "moe_config.backend"),
        ("1.2.1", {"build_config": {}}, "build_config"),
    ],
)
def test_constructor_with_missing_key_is_value_error(
    version: str, args: dict[str, Any], key: str
) -> None:
    with fake_tensorrt_llm(version) as package, pytest.raises(ValueError, match=key):
        package.LLM("nowhere", **args)


def test_arguments_are_rejected_by_read_candidate_only() -> None:
    prio = {"model": "m", "scheduler_config": {"waiting_queue_policy": "prio"}}
    cache = {"model": "m", "cache_transceiver_config": {"backend": "NIXL", "of_the_future": True}}
    with fake_tensorrt_llm("1.3.0rc27") as package:
        for args, key in ((prio, "waiting_queue_policy"), (cache, "of_the_future")):
            with pytest.raises(ValueError, match=key):
                package.standin.release.checked_arguments("TorchLlmArgs", args)
    for version in ("1.3.0rc29", "1.4.0rc1"):  # of both only a part was read
        with fake_tensorrt_llm(version) as package:
            taken = package.standin.release.checked_arguments("TorchLlmArgs", prio | cache)
            assert taken["scheduler_config"]["waiting_queue_policy"] == "prio"
            assert taken["cache_transceiver_config"]["of_the_future"] is True


async def test_context_only_returns_one_token_and_changes_caller(trt: Any, llm: Any) -> None:
    mine = sampling(trt)
    params = trt.DisaggregatedParams(request_type="CONTEXT_ONLY")
    result = llm.generate_async(PROMPT, mine, disaggregated_params=params)
    assert mine.max_tokens == 1
    output = (await result).outputs[0]
    assert (output.finish_reason, output.length) == ("length", 1)
    answered = output.disaggregated_params
    assert answered.request_type == "context_only"
    assert answered.first_gen_tokens == output.token_ids
    assert isinstance(answered.opaque_state, bytes)
    assert answered.ctx_request_id > 1 << 53


async def test_two_calls_joined_give_equal_tokens(trt: Any, llm: Any, tiny: Path) -> None:
    decode = await asyncio.to_thread(make, trt, tiny)
    whole = (await llm.generate_async(PROMPT, sampling(trt))).outputs[0].token_ids
    answered = (await context(trt, llm)).outputs[0].disaggregated_params
    steps = [
        list(step.outputs[0].token_ids_diff)
        async for step in decode.generate_async(
            PROMPT, sampling(trt), streaming=True, disaggregated_params=decode_params(trt, answered)
        )
    ]
    assert steps[0] == whole[:1]
    assert [token for step in steps for token in step] == whole
    await asyncio.to_thread(decode.shutdown)


async def test_decode_of_changed_parameters_names_the_field(trt: Any, llm: Any) -> None:
    answered = (await context(trt, llm)).outputs[0].disaggregated_params
    for change in ({"ctx_request_id": 3}, {"opaque_state": b"x"}, {"opaque_state": "text"}):
        result = llm.generate_async(
            PROMPT, sampling(trt), disaggregated_params=decode_params(trt, answered, **change)
        )
        with pytest.raises(trt.llmapi.RequestError, match=next(iter(change))):
            await result


async def test_stream_changes_one_object_with_cumulative_ids(trt: Any, llm: Any) -> None:
    seen = [step async for step in llm.generate_async(PROMPT, sampling(trt), streaming=True)]
    assert len(seen) == 8
    assert len({id(step) for step in seen}) == 1
    assert seen[0].outputs[0].length == 8
    assert seen[0].finished


async def test_stop_word_when_met_then_cut_unless_asked_for(trt: Any, llm: Any) -> None:
    free = (await llm.generate_async(PROMPT, sampling(trt))).outputs[0].token_ids
    stop = {"stop_token_ids": [free[3]]}
    cut = (await llm.generate_async(PROMPT, sampling(trt, **stop))).outputs[0]
    assert (cut.token_ids, cut.finish_reason, cut.stop_reason) == (free[:3], "stop", free[3])
    kept = await llm.generate_async(PROMPT, sampling(trt, include_stop_str_in_output=True, **stop))
    assert kept.outputs[0].token_ids == free[:4]
    ended = (await llm.generate_async(PROMPT, sampling(trt, end_id=free[3]))).outputs[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (free[:4], "stop", None)


async def test_prefill_stopped_at_first_token_holds_nothing(trt: Any, llm: Any) -> None:
    first = (await context(trt, llm)).outputs[0].token_ids
    result = await context(trt, llm, end_id=first[0])
    assert result.outputs[0].finish_reason == "stop"
    assert result.outputs[0].disaggregated_params is None
    result = await context(trt, llm, stop_token_ids=first, include_stop_str_in_output=True)
    assert result.outputs[0].finish_reason == "length"
    assert result.outputs[0].disaggregated_params.first_gen_tokens == first


async def test_setup_without_end_id_needs_a_tokenizer(trt: Any, llm: Any, tiny: Path) -> None:
    with pytest.raises(ValueError, match="end_id"):
        llm.generate_async(PROMPT, sampling(trt, end_id=None))
    other = await asyncio.to_thread(make, trt, tiny, skip_tokenizer_init=False)
    mine = sampling(trt, end_id=None)
    await other.generate_async(PROMPT, mine)
    assert mine.end_id == 1
    with pytest.raises(RuntimeError, match="not processed by tokenizer"):
        llm.generate_async(PROMPT, sampling(trt, stop="x"))
    await asyncio.to_thread(other.shutdown)


async def test_prompt_longer_than_a_step_needs_chunking(trt: Any, tiny: Path) -> None:
    llm = await asyncio.to_thread(make, trt, tiny, max_num_tokens=40)
    with pytest.raises(trt.llmapi.RequestError, match="max_num_tokens"):
        llm.generate_async(PROMPT, sampling(trt))
    await asyncio.to_thread(llm.shutdown)
    llm = await asyncio.to_thread(make, trt, tiny, max_num_tokens=40, enable_chunked_prefill=True)
    assert (await llm.generate_async(PROMPT, sampling(trt))).outputs[0].length == 8
    await asyncio.to_thread(llm.shutdown)


async def test_abort_ends_cancelled_and_asserts_after_shutdown(trt: Any, tiny: Path) -> None:
    llm = await asyncio.to_thread(make, trt, tiny)
    result = llm.generate_async(PROMPT, sampling(trt, max_tokens=4000), streaming=True)
    await anext(result)
    result.abort()
    async for _ in result:
        pass
    assert result.outputs[0].finish_reason == "cancelled"
    assert result.aborted()
    await asyncio.to_thread(llm.shutdown)
    with pytest.raises(AssertionError):
        result.abort()
    with pytest.raises(RuntimeError, match="shutting down"):
        llm.generate_async(PROMPT, sampling(trt))
    del llm
    gc.collect()
    with pytest.raises(AssertionError):
        result.abort()


def test_await_when_no_loop_ran_at_the_call_then_it_asserts(trt: Any, tiny: Path) -> None:
    llm = make(trt, tiny)
    result = llm.generate_async(PROMPT, sampling(trt))
    assert result.result().outputs[0].length == 8

    async def late() -> None:
        await llm.generate_async(PROMPT, sampling(trt))

    asyncio.run(late())
    again = llm.generate_async(PROMPT, sampling(trt))
    with pytest.raises(AssertionError, match="event loop"):
        asyncio.run(again.aresult())
    llm.shutdown()


async def test_stats_when_not_enabled_then_none_come(trt: Any, llm: Any, tiny: Path) -> None:
    quiet = await asyncio.to_thread(make, trt, tiny, enable_iter_perf_stats=False)
    for made in (llm, quiet):
        await made.generate_async(PROMPT, sampling(trt))
    assert await asyncio.to_thread(quiet.get_stats, 0.05) == []
    rows = await asyncio.to_thread(llm.get_stats, 0.05)
    assert rows[0]["kvCacheStats"]["usedNumBlocks"] > 0
    await asyncio.to_thread(quiet.shutdown)


@pytest.mark.parametrize(
    ("trap", "error"),
    [
        ("request_fails", "RequestError"),
        ("step_fails", "RequestError"),
        ("executor_dies", "RuntimeError"),
    ],
)
async def test_failure_kind_says_whether_the_executor_lives(
    trt: Any, llm: Any, trap: str, error: str
) -> None:
    async def run() -> None:
        # raises at once if the executor is dead by then
        await llm.generate_async(PROMPT, sampling(trt)).aresult()

    with trt.standin.traps.turned(trap):
        failures = await asyncio.gather(run(), run(), return_exceptions=True)
    assert {type(failure).__name__ for failure in failures} == {error}
    assert llm._check_health() is (trap != "executor_dies")
    if trap == "executor_dies":
        with pytest.raises(RuntimeError, match="shutting down"):
            llm.generate_async(PROMPT, sampling(trt))
    else:
        assert (await llm.generate_async(PROMPT, sampling(trt))).outputs[0].length == 8


PLAYED = (
    *((version, "CPP") for version in RELEASES),
    ("1.3.0rc20", "CPP"),
    ("1.3.0rc29", "PYTHON"),
)


@pytest.mark.long
@pytest.mark.parametrize(("version", "runtime"), PLAYED)
def test_probes_find_the_assumed_traps_of_the_stand_in(
    version: str, runtime: str, tiny: Path
) -> None:
    with fake_tensorrt_llm(version) as package:
        answers = probes.run(package, str(tiny), runtime=runtime, kv_timeout_s=1.0)
    assert len(answers) > 10
    differing = [
        answer
        for answer in answers
        if not answer.is_as_assumed and answer.question != "structural_tag"
    ]  # it has none
    assert differing == []


def test_report_when_an_answer_differs_then_its_row_is_marked() -> None:
    text = report.table(
        [report.Row("a", "works", "works"), report.Row("b", "works", "Error: x | y\nz")]
    )
    assert text.splitlines()[2:] == [
        "| a | works | works |  |",
        "| b | works | Error: x \\| y z | **differs** |",
    ]


def test_traps_when_one_is_unknown_then_refused_by_name(trt: Any) -> None:
    with pytest.raises(ValueError, match="no trap 'x'"), trt.standin.traps.turned("x"):
        pass


@pytest.mark.parametrize("version", RELEASES)
def test_differences_from_manifest_are_found(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison that the real package is put to, so that its text is known to work."""
    release = release_for(version)
    with fake_tensorrt_llm(version) as package:
        assert differences(package, release) == []

        def generate_async(
            self: Any, inputs: Any, priority: float = 0.5, renamed: bool = False
        ) -> None: ...

        monkeypatch.setattr(package.LLM, "generate_async", generate_async)
        found = differences(package, release)
    is_complete = not release.is_in_part("LLM.generate_async")
    assert ("LLM.generate_async.renamed is new" in found) is is_complete
    assert "LLM.generate_async.sampling_params is missing" in found
