"""The small parts of the vllm engine: the manifest, outputs, KV transfers, the side channel, preflight,
reclaiming.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines import argument_schema as schema
from dynamo_trtllm.engines.external.library import LibraryPackage
from dynamo_trtllm.engines.gpu import Gpu
from dynamo_trtllm.engines.vllm import bindings, compilation, releases, transfer_params
from dynamo_trtllm.engines.vllm.api_manifests import LIBRARY
from dynamo_trtllm.engines.vllm.args import vllm_args
from dynamo_trtllm.engines.vllm.engine import StepStats
from dynamo_trtllm.engines.vllm.extension import WorkerExtension
from dynamo_trtllm.engines.vllm.library import VllmCall
from dynamo_trtllm.engines.vllm.preflight import PEERS, WORKER, VllmFacts, findings
from dynamo_trtllm.engines.vllm.transfer_params import KvReleaser
from dynamo_trtllm.models.checkpoint import SHAPES, Checkpoint
from dynamo_trtllm.protocol.errors import ConfigError, RequestRejected, TransferMismatch
from dynamo_trtllm.protocol.messages import (
    Instance,
    KvLayout,
    KvTransferParams,
    ModelDeploymentCard,
    Role,
    TokenLogprob,
    encode,
    token_ids,
)
from tests.kit.cases import each_case
from tests.kit.waiting import SOON_S

LAYOUT = KvLayout(dtype="bfloat16", block_tokens=16, num_layers=2, num_kv_heads=2, head_dim=8)
ANSWERED = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": ([1, 2], [2]),
    "remote_engine_id": "e",
    "remote_request_id": "r-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 2,
    "remote_num_tokens": 30,
}

# --- manifest -------------------------------------------------------------------------------------


def test_manifest_has_the_kinds_of_important_arguments() -> None:
    root = LIBRARY.newest.fields(LIBRARY.root)
    assert len(root) > 200
    assert (root["tensor_parallel_size"].type, root["tensor_parallel_size"].default) == ("int", 1)
    assert root["kv_transfer_config"].type == "Optional[KVTransferConfig]"
    assert "mxfp4" not in root  # names of arguments, not of values
    assert schema.is_known(LIBRARY, "kv_transfer_config.kv_role")
    assert not schema.is_known(LIBRARY, "kv_transfer_config.kv_rolle")


# --- outputs --------------------------------------------------------------------------------------


def output(*tokens: int, finish: str | None = None, has_logprobs: bool = False) -> Any:
    entries = [
        {t: SimpleNamespace(logprob=-1.0), t + 1: SimpleNamespace(logprob=-0.5)} for t in tokens
    ]
    logprobs = entries if has_logprobs else None
    completion = SimpleNamespace(token_ids=list(tokens), logprobs=logprobs, finish_reason=finish)
    return SimpleNamespace(outputs=[completion], num_cached_tokens=None, prompt_logprobs=None)


def call_of(
    alternatives: int | None,
    *,
    first: tuple[int, ...] = (),
    first_logprobs: tuple[TokenLogprob, ...] = (),
) -> VllmCall:
    converted: Any = SimpleNamespace(
        exports_kv=False, stop_ids=frozenset(), seed=None, tokens_of_prefill=first
    )
    request: Any = SimpleNamespace(
        sampling=SimpleNamespace(logprobs=alternatives, prompt_logprobs=None, seed=None),
        kv_params=SimpleNamespace(first_logprobs=first_logprobs),
    )
    library: Any = None
    return VllmCall(library, request, converted, "r.1")


def test_reader_emits_prompt_token_with_first_step() -> None:
    call = call_of(None, first=(7,))
    assert call.read(output(8))[0].token_ids.tolist() == [7, 8]
    last, finish = call.read(output(9, finish="length"))
    assert (last.token_ids.tolist(), finish) == ([9], "length")


def test_reader_first_log_probability_is_of_prefill() -> None:
    brought = (TokenLogprob(7, -0.1, ()),)
    step, _ = call_of(1, first=(7,), first_logprobs=brought).read(output(8, has_logprobs=True))
    assert step.logprobs == (brought[0], TokenLogprob(8, -1.0, ((9, -0.5),)))
    again, _ = call_of(1, first_logprobs=brought).read(output(7, 8, has_logprobs=True))
    assert again.logprobs == (brought[0], TokenLogprob(8, -1.0, ((9, -0.5),)))
    other, _ = call_of(0, first_logprobs=brought).read(output(6, has_logprobs=True))
    assert other.logprobs == (TokenLogprob(6, -1.0, ()),)


def test_reader_when_log_probabilities_are_missing_then_refused() -> None:
    with pytest.raises(RequestRejected):
        call_of(1).read(output(8))


# --- KV transfers ---------------------------------------------------------------------------------


def transfer_params_with(engine_state: bytes) -> KvTransferParams:
    return KvTransferParams(
        version=1,
        transfer_id="t",
        engine="vllm",
        model="m",
        layout=LAYOUT,
        prefill_instance_id=1,
        expires_at=time.time() + 60,
        prompt_tokens=30,
        first_token_ids=token_ids([5]),
        transport="vllm/nixl",
        kv_bytes=1,
        engine_state=engine_state,
    )


def test_transfer_unpacks_to_connector_answer_and_seed() -> None:
    found = transfer_params.unpack(
        transfer_params_with(transfer_params.pack(ANSWERED, release="0.24.0", seed=2**62))
    )
    expires_at = found.kv_transfer_params["dynamo_expires_at"]
    assert found.kv_transfer_params == {
        **ANSWERED,
        "remote_block_ids": [[1, 2], [2]],
        "dynamo_expires_at": expires_at,
    }
    assert (found.first_token, found.seed) == (5, 2**62)


@pytest.mark.parametrize(
    "params",
    [None, {}, {**ANSWERED, "remote_block_ids": None}, {**ANSWERED, "remote_port": "x"}, {"a": 1}],
)
def test_transfer_of_other_connector_answer_is_rejected(params: Any) -> None:
    with pytest.raises(RequestRejected) as caught:
        transfer_params.pack(params, release="0.24.0", seed=None)
    assert caught.value.field == "kv_transfer_config"


@each_case(
    "bad",
    [
        {"remote_block_ids": [["1"]]},
        {"remote_block_ids": [[-1]]},
        {"remote_port": "5600"},
        {"tp_size": 0},
        {"tp_size": math.nan},
        {"remote_num_tokens": 1 << 63},
    ],
)
def test_transfer_when_a_number_is_out_of_range_then_mismatch(bad: dict[str, Any]) -> None:
    state = {"version": 1, "release": "0.24.0", "params": ANSWERED | bad}
    with pytest.raises(TransferMismatch, match=next(iter(bad))):
        transfer_params.unpack(transfer_params_with(encode(state)))


@pytest.mark.parametrize("engine_state", [b"", b"\x80", b"junk"])
def test_transfer_when_it_is_not_ours_then_mismatch(engine_state: bytes) -> None:
    with pytest.raises(TransferMismatch):
        transfer_params.unpack(transfer_params_with(engine_state))


# --- side channel ---------------------------------------------------------------------------------


def test_channel_uses_free_ports_or_the_users() -> None:
    host, port = transfer_params.choose_side_channel("127.0.0.1", 2, {}).values()
    assert host == "127.0.0.1"
    for number in (port, port + 1):
        socket.create_server((host, number)).close()
    theirs = {transfer_params.HOST: "10.1.2.3", transfer_params.PORT: "65534"}
    chosen = transfer_params.choose_side_channel("127.0.0.1", 2, theirs)
    assert chosen == {"side_channel_host": "10.1.2.3", "side_channel_port": 65534}


@each_case("port", ["", "x", "0", "-1", "65535", "70000"])
def test_channel_with_wrong_port_is_rejected_by_name(port: str) -> None:
    with pytest.raises(ConfigError, match=transfer_params.PORT):
        transfer_params.choose_side_channel("127.0.0.1", 2, {transfer_params.PORT: port})


# --- warm-up --------------------------------------------------------------------------------------

CAPTURED = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]


def parts(
    limit: int, captured: list[int], *, is_eager: bool = False, device: str = "cuda", ranks: int = 1
) -> Any:
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=limit),
        model_config=SimpleNamespace(enforce_eager=is_eager),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=captured),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=4, enable_expert_parallel=False, data_parallel_size=ranks
        ),
    )


def test_token_counts_of_gpt_oss_cover_compiled_kernels() -> None:
    """The simulation ran Triton's own launch code with these counts; 3000 random steps afterwards
    compiled nothing.
    """
    simulated = {
        16383,
        16351,
        16255,
        15935,
        15932,
        15920,
        2079,
        2076,
        2064,
        1839,
        1836,
        1824,
        1055,
        1052,
        1040,
    }
    counts = compilation.token_counts(SHAPES["gpt-oss-120b"], parts(16384, CAPTURED))
    assert simulated | {935, 932, 928} <= set(counts)
    assert len(counts) < 30
    assert not set(compilation.token_counts(SHAPES["gpt-oss-120b"], parts(8192, CAPTURED))) & set(
        range(513)
    )


def test_token_counts_include_unpadded_small_steps() -> None:
    model = SHAPES["gpt-oss-120b"]
    assert min(compilation.token_counts(model, parts(16384, CAPTURED, is_eager=True))) == 1
    assert compilation.token_counts(model, parts(16384, CAPTURED, device="cpu")) == []
    assert compilation.token_counts(model, parts(16384, CAPTURED, ranks=2)) == []
    dense = replace(model, num_experts=0)
    assert compilation.token_counts(dense, parts(16384, CAPTURED)) == [16383, 8191, 4095, 2047]


# --- statistics -----------------------------------------------------------------------------------


def test_stats_when_two_ranks_have_reported_then_their_sum() -> None:
    stats = StepStats()
    assert stats.counts() == (0, 0, 0)
    stats.blocks_per_rank = 101
    for rank, usage in ((0, 0.5), (1, 0.25), (1, 0.1)):
        load = SimpleNamespace(num_waiting_reqs=1, num_skipped_waiting_reqs=2, kv_cache_usage=usage)
        stats.record(rank, load)
    assert stats.counts(2) == (6, 60, 200)


# --- preflight ------------------------------------------------------------------------------------

MODEL = Checkpoint(
    folder=Path("/m"),
    model_type="gpt_oss",
    num_layers=36,
    num_attention_heads=64,
    num_kv_heads=8,
    head_dim=64,
    hidden_size=2880,
    intermediate_size=2880,
    vocab_size=201088,
    context_length=131072,
    quantization="mxfp4",
    sliding_window=128,
    num_sliding_layers=18,
)
HOPPER = Gpu(name="NVIDIA H200", sm=90, memory_bytes=143771 << 20)


def facts(
    role: Role = Role.PREFILL, *, num_gpus: int = 8, vllm: str = "0.33.0", **args: Any
) -> VllmFacts:
    config = WorkerConfig(
        model_path="/m", engine="vllm", disaggregation_mode=role, override_engine_args=args
    )
    return VllmFacts(
        role=role,
        args=vllm_args(config, releases.describe(vllm).manifest),
        model=MODEL,
        gpu=HOPPER,
        num_gpus=num_gpus,
    )


def peer(engine: str = "vllm", tp: int = 1, block: int = 128, folder: str = "/m") -> Instance:
    card = ModelDeploymentCard(
        name="m", context_length=1, vocab_size=1, eos_token_ids=(), renderer="harmony"
    )
    return Instance(
        id=2,
        namespace="n",
        component="c",
        endpoint="e",
        subject="s",
        role=Role.DECODE,
        engine=engine,
        card=card,
        layout=KvLayout(
            dtype="bfloat16",
            block_tokens=block,
            num_layers=36,
            num_kv_heads=8,
            head_dim=64,
            tensor_parallel_size=tp,
        ),
        kv_compat={"model_folder": folder},
    )


CROSS_LAYERS = {"kv_transfer_config.kv_connector_extra_config.enable_cross_layers_blocks": True}
WRONG_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"tensor_parallel_size": 16}, "vllm-too-few-gpus"),
    ({"tensor_parallel_size": 3}, "vllm-heads-not-divisible"),
    ({"max_model_len": 200000}, "vllm-context-too-long"),
    (
        {"enable_chunked_prefill": False, "max_model_len": 9000, "max_num_batched_tokens": 8192},
        "vllm-prompts-too-long-for-a-step",
    ),
    ({"pipeline_parallel_size": 2}, "vllm-pipeline-kv-transfer"),
    ({"enable_prefix_caching": False}, "vllm-no-prefix-caching"),
    ({"load_format": "dummy"}, "vllm-dummy-weights"),
    ({"moe_backend": "flashinfer_trtllm"}, "vllm-mxfp4-backend"),
    ({"dtype": "float16"}, "vllm-mxfp4-dtype"),
    ({"block_size": 32}, "vllm-small-blocks"),
    (CROSS_LAYERS, "vllm-cross-layers-ignored"),
]
WRONG_PEERS = [
    (peer(engine="torch"), "vllm-engine-differs"),
    (peer(tp=3), "vllm-tp-ratio"),
    (peer(block=32), "vllm-block-size-differs"),
    (peer(folder="/n"), "vllm-folder-differs"),
]


def test_preflight_when_all_fits_then_nothing_is_found() -> None:
    assert findings(facts(tensor_parallel_size=2), [peer(tp=4)]) == []


@each_case(("args", "rule"), WRONG_ARGUMENTS)
def test_preflight_names_rule_of_impossible_argument(args: dict[str, Any], rule: str) -> None:
    (found,) = findings(facts(**args), [])
    assert found.rule == rule
    assert found.field in args
    assert found.fix


@pytest.mark.parametrize(("other", "rule"), WRONG_PEERS)
def test_preflight_names_both_peers_that_cannot_pair(other: Instance, rule: str) -> None:
    (found,) = findings(facts(tensor_parallel_size=2), [other])
    assert (found.rule, found.severity) == (rule, "error")
    assert "decode worker 2" in found.other


def test_rules_when_listed_then_each_is_found_by_a_test_above() -> None:
    names = {rule.name for section in (WORKER, PEERS) for rule in section.rules}
    assert names == {rule for _, rule in (*WRONG_ARGUMENTS, *WRONG_PEERS)} | {"vllm-half-kv"}


@each_case("role", [Role.PREFILL, Role.DECODE])
@each_case(
    ("vllm", "rules"),
    [
        ("0.24.0", ["vllm-half-kv"]),
        ("0.25.1", ["vllm-half-kv"]),
        ("0.26.0", []),
        ("0.28.0", []),
        ("0.29.0", ["vllm-cross-layers-ignored"]),
        ("0.34.0", ["vllm-cross-layers-ignored"]),
    ],
)
@each_case("word", [True, "True", "true"])  # as vLLM reads it
def test_preflight_rejects_blocks_that_span_layers(
    vllm: str, rules: list[str], role: Role, word: object
) -> None:
    found = findings(facts(role, vllm=vllm, **dict.fromkeys(CROSS_LAYERS, word)), [])
    assert [finding.rule for finding in found] == rules
    off = findings(facts(role, vllm=vllm, **dict.fromkeys(CROSS_LAYERS, False)), [])
    assert off == []


def test_preflight_allows_small_blocks_when_aggregated() -> None:
    assert findings(facts(Role.AGGREGATED, block_size=16), []) == []


def test_preflight_error_for_earlier_release_has_both_sizes() -> None:
    (found,) = findings(facts(), [peer(block=16)])
    text = str(found)
    assert "128" in text
    assert "16 at" in found.other
    assert "--kv-block-size" in found.fix


# --- reclaiming -----------------------------------------------------------------------------------


async def test_reclaimer_asks_again_for_missing_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo_trtllm.engines.vllm.transfer_params._RETRY_INTERVAL_S", 0.0)
    asked: list[list[str]] = []
    done = asyncio.Event()

    async def release(ids: list[str]) -> list[list[str]]:
        asked.append(ids)
        if len(asked) == 2:
            done.set()
        return [["a"]] if len(asked) == 1 else [["b"], []]

    reclaimer = KvReleaser(release)
    reclaimer.post("a")
    reclaimer.post("b")
    async with asyncio.timeout(SOON_S):
        await done.wait()
    assert asked == [["a", "b"], ["b"]]
    await reclaimer.aclose()
    await reclaimer.aclose()


async def test_reclaimer_unsupported_by_engine_continues() -> None:
    tried = asyncio.Queue[list[str]]()

    async def release(ids: list[str]) -> list[list[str]]:
        tried.put_nowait(ids)
        raise RuntimeError("the worker has no such method")

    reclaimer = KvReleaser(release)
    async with asyncio.timeout(SOON_S):
        for name in ("a", "b"):
            reclaimer.post(name)
            assert await tried.get() == [name]
    await reclaimer.aclose()


def test_extension_ends_only_the_named_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = SimpleNamespace(_reqs_to_send={"x-0a": 9.0, "r.1-0b": 8.0, "r.11-0c": 7.0})
    group = SimpleNamespace(connector_worker=worker)
    monkeypatch.setattr(bindings, "kv_transfer_group", lambda: group)
    assert WorkerExtension().dynamo_release_kv(["r.1", "gone"]) == ["r.1"]
    assert list(worker._reqs_to_send.items()) == [("r.1-0b", 0.0), ("x-0a", 9.0), ("r.11-0c", 7.0)]


# --- vendor ---------------------------------------------------------------------------------------


def test_version_when_vllm_is_not_installed_then_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LibraryPackage, "is_installed", lambda _: False)
    with pytest.raises(
        ConfigError, match=r"needs vLLM 0.24 to 0.33; run pip install -e '\.\[vllm\]' in a checkout"
    ):
        releases.installed()


@pytest.mark.parametrize(
    ("version", "manifest"),
    [
        ("0.24.0", "0.24.0"),
        ("0.25.0+cpu", "0.25.1"),
        ("0.27.9", "0.27.1"),
        ("0.33.0.post1", "0.33.0"),
    ],
)
def test_version_with_tested_minor_has_its_manifest(version: str, manifest: str) -> None:
    found = releases.describe(version)
    assert (found.manifest.name, found.note) == (manifest, "")
    assert not found.manifest.is_in_part("AsyncEngineArgs")


@each_case(
    ("version", "nearest"),
    [
        ("0.34.0", "0.33.0"),
        ("1.2.0", "0.33.0"),
        ("0.34.1rc1.dev12+gabc", "0.33.0"),
        ("0.33.1rc1.dev5+g12", "0.33.0"),
        ("0.28.1.dev3", "0.28.0"),
        ("0.1.dev1+g0d8bb30.precompiled", "0.33.0"),  # a checkout without tags
        ("nightly", "0.33.0"),
    ],
)
def test_version_untested_passes_unknown_arguments(version: str, nearest: str) -> None:
    found = releases.describe(version)
    assert found.manifest.name == nearest
    assert version.partition("+")[0] in found.note
    config = WorkerConfig(
        model_path="m", engine="vllm", override_engine_args={"an_argument_of_tomorrow": 1}
    )
    args = vllm_args(config, found.manifest)
    assert args.values["an_argument_of_tomorrow"] == 1
    assert any("an_argument_of_tomorrow" in note for note in args.notes)


@pytest.mark.parametrize("version", ["0.23.1", "0.9.2", "0.8.5.post1", "0.23.0.dev1"])
def test_version_too_old_says_what_to_install(version: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"vLLM {version} is installed, .* supports 0.24 to 0.33; run pip"
    ):
        releases.describe(version)


@pytest.mark.parametrize(("release", "works"), [("0.24.0", True), ("0.32.0", False)])
def test_argument_dropped_by_a_release_is_rejected(release: str, works: bool) -> None:
    config = WorkerConfig(
        model_path="m", engine="vllm", override_engine_args={"max_num_partial_prefills": 2}
    )
    if works:
        assert (
            vllm_args(config, releases.describe(release).manifest).values[
                "max_num_partial_prefills"
            ]
            == 2
        )
    else:
        with pytest.raises(ConfigError, match=rf"vLLM {release} has no max_num_partial_prefills"):
            vllm_args(config, releases.describe(release).manifest)


def test_preflight_allows_spanning_for_one_layer_kind() -> None:
    uniform = replace(
        facts(vllm="0.24.0", **CROSS_LAYERS), model=replace(MODEL, num_sliding_layers=0)
    )
    assert [finding.rule for finding in findings(uniform, [])] == []
