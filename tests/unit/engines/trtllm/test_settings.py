"""What follows from arguments, release and model before the first request."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.external.library import model_stop_ids
from dynamo_trtllm.engines.trtllm import engine, model_limits
from dynamo_trtllm.engines.trtllm.api_manifests import release_for
from dynamo_trtllm.engines.trtllm.args import TrtllmArgs, statistics_note, trtllm_args
from dynamo_trtllm.engines.trtllm.preflight.facts import RoleFacts
from dynamo_trtllm.models.checkpoint import Checkpoint
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Phase, Role
from tests.kit.cases import each_case
from tests.kit.scripted_library import info_of

PENALTIES = {"repetition_penalty", "presence_penalty", "frequency_penalty", "min_p"}


def args_of(version: str, role: Role = Role.AGGREGATED, **values: Any) -> TrtllmArgs:
    config = WorkerConfig(
        model_path="m",
        kernels_profile="fallback",
        disaggregation_mode=role,
        override_engine_args=values,
    )
    return trtllm_args(config, release_for(version), [])


def facts_of(
    version: str = "1.2.1",
    role: Role = Role.PREFILL,
    model: Checkpoint | None = None,
    **values: Any,
) -> RoleFacts:
    return RoleFacts(
        role=role,
        args=args_of(version, role, **values),
        release=version,
        model=model or checkpoint(),
    )


def checkpoint(**changes: Any) -> Checkpoint:
    values = {
        "folder": Path("m"),
        "model_type": "gpt_oss",
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "hidden_size": 64,
        "intermediate_size": 64,
        "vocab_size": 201088,
        "context_length": 4096,
        "eos_token_ids": (200002, 199999),
    }
    return Checkpoint(**{**values, **changes})


OLD_FIELDS = frozenset({"first_gen_tokens", "opaque_state"})


def bindings(fields: frozenset[str], *parameters: str) -> Any:
    return SimpleNamespace(
        classes={}, parameters=frozenset(parameters), disagg_fields=fields, is_since_1_2=True
    )


def refused(
    version: str,
    role: Role = Role.AGGREGATED,
    *,
    fields: frozenset[str] = OLD_FIELDS,
    **values: Any,
) -> set[str]:
    features = set(engine.unsupported_features(facts_of(version, role, **values), bindings(fields)))
    assert "prompt_logprobs" in features  # with every release and every argument
    return features - {"prompt_logprobs"}


@pytest.mark.parametrize("version", ["1.1.0", "1.2.1", "1.3.0rc23"])
def test_rejects_what_the_pytorch_sampler_ignores(version: str) -> None:
    assert refused(version, guided_decoding_backend="xgrammar") == {*PENALTIES, "seed"}


@pytest.mark.parametrize("version", ["1.1.0", "1.2.1"])
def test_refuses_when_the_sampler_is_trtllms_then_nothing(version: str) -> None:
    assert (
        refused(version, guided_decoding_backend="xgrammar", sampler_type="TRTLLMSampler") == set()
    )


def test_rejects_guided_and_ignored_fields_by_default() -> None:
    for version in ("1.3.0rc27", "1.3.0rc29", "1.3.0", "1.4.0rc1"):
        assert refused(version) == {"guided"}
    assert refused("1.3.0rc24") == refused("1.3.0rc26") == {"guided", "seed"}


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_rejects_logprobs_without_first_token_value(role: Role) -> None:
    assert "logprobs" in refused("1.2.1", role)
    assert "logprobs" not in refused("1.2.1", Role.AGGREGATED)
    assert "logprobs" not in refused("1.3.0rc29", role, fields=OLD_FIELDS | {"first_gen_log_probs"})


@each_case(
    ("version", "values", "works"),
    [
        ("1.1.0", {}, False),
        ("1.2.1", {}, False),
        ("1.2.1", {"sampler_type": "TRTLLMSampler"}, True),
        ("1.3.0rc23", {}, False),
        ("1.3.0rc24", {}, True),
        ("1.3.0", {}, True),
    ],
)
def test_min_tokens_is_supported_when_end_id_is_held_back(
    version: str, values: dict[str, Any], works: bool
) -> None:
    found = model_limits.TrtllmModelLimits(
        facts_of(version, **values), info_of(), is_since_1_2=True
    )
    assert found.has_min_tokens is works


def test_values_when_made_then_workers_of_text_are_not_there() -> None:
    args = args_of("1.2.1", num_postprocess_workers=4)
    assert args.values["num_postprocess_workers"] == 0
    assert any("num_postprocess_workers 4 (--override-engine-args)" in note for note in args.notes)
    assert args.values["enable_iter_perf_stats"] is True


def test_statistics_switched_off_note_what_is_lost() -> None:
    args = args_of("1.2.1", enable_iter_perf_stats=False)
    assert args.values["enable_iter_perf_stats"] is False
    note = statistics_note(args)
    assert note.startswith("enable_iter_perf_stats is false (--override-engine-args)")
    assert "stalled" in note
    assert "cost model" in note


def test_statistics_on_note_their_cost() -> None:
    assert "costs time in each step" in statistics_note(args_of("1.2.1"))


BUFFER = {"cache_transceiver_config": {"backend": "UCX", "max_tokens_in_buffer": 256}}


@each_case(
    ("phase", "values", "limit", "why"),
    [
        (Phase.PREFILL, {"max_num_tokens": 512}, 512, "max_num_tokens"),
        (
            Phase.PREFILL,
            {"max_num_tokens": 512, "enable_chunked_prefill": True},
            4095,
            "max_seq_len",
        ),
        (Phase.DECODE, {"max_num_tokens": 512}, 4095, "max_seq_len"),
        (Phase.AGGREGATED, {"max_num_tokens": 512}, 512, "max_num_tokens"),
        (Phase.AGGREGATED, BUFFER, 4095, "max_seq_len"),
        (Phase.DECODE, BUFFER, 256, "max_tokens_in_buffer"),
        (Phase.PREFILL, BUFFER, 256, "max_tokens_in_buffer"),
        (Phase.DECODE, {"max_seq_len": 100}, 99, "max_seq_len 100"),
    ],
)
def test_prompt_limit_is_the_smallest_with_its_name(
    phase: Phase, values: dict[str, Any], limit: int, why: str
) -> None:
    found = model_limits.prompt_limit(facts_of(role=Role.DECODE, **values), phase)
    assert found.tokens == limit
    assert why in found.why


def test_context_when_it_is_unknown_then_the_flag_is_named() -> None:
    with pytest.raises(ConfigError, match="--max-seq-len"):
        model_limits.context_length(facts_of(model=checkpoint(context_length=0)))


def test_pairing_of_default_attention_allows_other_ranks() -> None:
    transceiver = {"cache_transceiver_config": {"backend": "UCX"}}
    assert engine.kv_compat(facts_of(**transceiver), "1.2.1") == {
        "release": "1.2",
        "transceiver": "UCX",
        "attn_backend": "TRTLLM",
    }
    other = engine.kv_compat(
        facts_of(attn_backend="FLASHINFER", tensor_parallel_size=2, **transceiver), "1.2.1"
    )
    assert other["tensor_parallel_size"] == "2"
    assert engine.kv_compat(facts_of(role=Role.AGGREGATED), "1.2.1") == {}


@each_case(
    ("config", "runtime"),
    [
        ({"backend": "UCX"}, "CPP"),  # set by the worker
        ({"backend": "MOONCAKE"}, "CPP"),
        ({"backend": "NIXL"}, "PYTHON"),
        ({"backend": "DEFAULT"}, "PYTHON"),
        ({"backend": "NIXL", "transceiver_runtime": "PYTHON"}, "PYTHON"),
        ({"backend": "NIXL", "transceiver_runtime": "CPP"}, "CPP"),
        ({"backend": "NIXL", "transceiver_runtime": None}, "CPP"),
        ({"backend": "NIXL", "kv_transfer_timeout_ms": None}, "CPP"),
    ],
)
def test_pairing_when_1_3_then_by_the_transceiver_that_runs(
    config: dict[str, Any], runtime: str
) -> None:
    found = engine.kv_compat(facts_of("1.3.0rc29", cache_transceiver_config=config), "1.3.0rc29")
    assert found["transceiver_runtime"] == runtime


def test_pairing_of_ucx_environment_uses_cpp_transceiver() -> None:
    found = replace(
        facts_of("1.3.0rc29", cache_transceiver_config={"backend": "DEFAULT"}),
        environment={"TRTLLM_USE_UCX_KVCACHE": "1"},
    )
    assert engine.kv_compat(found, "1.3.0rc29")["transceiver_runtime"] == "CPP"


def test_pairing_of_python_transceiver_needs_the_same_build() -> None:
    nixl, ucx = ({"cache_transceiver_config": {"backend": name}} for name in ("NIXL", "UCX"))
    assert (
        engine.kv_compat(facts_of("1.3.0rc29", **nixl), "1.3.1+cu130")["release"] == "1.3.1+cu130"
    )
    assert engine.kv_compat(facts_of("1.3.0rc29", **ucx), "1.3.1+cu130")["release"] == "1.3"
    assert engine.kv_compat(facts_of("1.2.1", **nixl), "1.2.1")["release"] == "1.2"


@pytest.mark.parametrize("backend", ["UCX", "MPI", "MOONCAKE"])
def test_runtime_without_nixl_is_set_to_cpp_with_a_note(backend: str) -> None:
    args = args_of("1.3.0rc29", Role.DECODE, cache_transceiver_config={"backend": backend})
    assert args.values["cache_transceiver_config"]["transceiver_runtime"] == "CPP"
    assert any(f"the Python transceiver has no {backend}" in note for note in args.notes)


@pytest.mark.parametrize(
    ("version", "config"),
    [
        ("1.3.0rc29", {"backend": "NIXL"}),
        ("1.3.0rc29", {"backend": "DEFAULT"}),
        ("1.2.1", {"backend": "UCX"}),  # rejects the key
        ("1.1.0", {"backend": "UCX"}),
    ],
)
def test_runtime_right_by_default_is_not_set(version: str, config: dict[str, Any]) -> None:
    args = args_of(version, Role.DECODE, cache_transceiver_config=config)
    assert "transceiver_runtime" not in args.values["cache_transceiver_config"]


def test_pairing_of_1_4_defaults_to_python() -> None:
    config = {"backend": "NIXL", "kv_transfer_timeout_ms": None}
    runtimes = {
        version: facts_of(version, cache_transceiver_config=config).runtime
        for version in ("1.3.0rc29", "1.4.0rc1")
    }
    assert runtimes == {"1.3.0rc29": "CPP", "1.4.0rc1": "PYTHON"}


def test_candidate_of_1_4_passes_new_keys() -> None:
    config = {"backend": "UCX", "agent_bounce_buffer_enable": True}
    found = facts_of("1.4.0rc1", cache_transceiver_config=config, iter_perf_stats_interval=10)
    transceiver = found.args.values["cache_transceiver_config"]
    assert (transceiver["agent_bounce_buffer_enable"], transceiver["transceiver_runtime"]) == (
        True,
        "CPP",
    )
    assert found.args.values["iter_perf_stats_interval"] == 10
    nixl = facts_of("1.4.0rc1", cache_transceiver_config={"backend": "NIXL"})
    assert engine.kv_compat(nixl, "1.4.0rc1")["transceiver_runtime"] == "PYTHON"


def test_prompt_limit_ignores_buffer_of_python_transceiver() -> None:
    config = {"cache_transceiver_config": {"backend": "NIXL", "max_tokens_in_buffer": 256}}
    for version, tokens in (("1.2.1", 256), ("1.3.0rc29", 4095)):
        assert (
            model_limits.prompt_limit(facts_of(version, Role.DECODE, **config), Phase.DECODE).tokens
            == tokens
        )


def test_ends_when_harmony_then_return_and_call_come_first() -> None:
    assert model_stop_ids(checkpoint()) == (200002, 200012, 199999)
    assert model_stop_ids(checkpoint(model_type="llama", eos_token_ids=(2,))) == (2,)
    assert model_stop_ids(checkpoint(vocab_size=100, eos_token_ids=(2,))) == (2,)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc29"])
def test_timeout_unset_is_set_above_the_transfer_ttl(version: str, role: Role) -> None:
    found = facts_of(version, role, cache_transceiver_config={"backend": "UCX"})
    assert found.args.values["cache_transceiver_config"]["kv_transfer_timeout_ms"] == 66_000
    assert engine.kv_timeout_s(found) == 66.0
    assert engine.kv_transfer_ttl_s(found, 60.0) == 60.0


@pytest.mark.parametrize(
    ("version", "role", "transceiver", "timeout_s"),
    [
        ("1.1.0", Role.PREFILL, {"backend": "UCX"}, math.inf),  # the release has no timeout
        ("1.2.1", Role.PREFILL, {"backend": "UCX", "kv_transfer_timeout_ms": None}, math.inf),
        ("1.2.1", Role.PREFILL, {"backend": "UCX", "kv_transfer_timeout_ms": 5000}, 5.0),
        ("1.2.1", Role.PREFILL, None, math.inf),
        ("1.2.1", Role.AGGREGATED, {"backend": "UCX"}, math.inf),
    ],
)
def test_timeout_is_not_set_when_unsupported_or_given(
    version: str, role: Role, transceiver: dict[str, Any] | None, timeout_s: float
) -> None:
    assert (
        engine.kv_timeout_s(facts_of(version, role, cache_transceiver_config=transceiver))
        == timeout_s
    )


def test_ttl_when_the_vendor_frees_kv_sooner_then_it_is_cut() -> None:
    transceiver = {"cache_transceiver_config": {"backend": "UCX", "kv_transfer_timeout_ms": 5000}}
    assert engine.kv_transfer_ttl_s(facts_of(**transceiver), 60.0) == 5.0
    assert engine.kv_transfer_ttl_s(facts_of(**transceiver), 3.0) == 3.0
    assert engine.kv_transfer_ttl_s(facts_of(), 60.0) == 60.0


@each_case(
    ("values", "conversations"),
    [
        ({}, False),
        ({"enable_attention_dp": True}, False),
        ({"attention_dp_config": {"kv_cache_routing_conversation_affinity": True}}, False),
        (
            {
                "enable_attention_dp": True,
                "attention_dp_config": {"kv_cache_routing_conversation_affinity": True},
            },
            True,
        ),
        ({"kv_cache_config": {"block_reuse_config": {"policy": "per_conversation"}}}, True),
        ({"kv_cache_config": {"block_reuse_config": {"policy": "per_request"}}}, False),
    ],
)
def test_conversations_in_arguments_are_passed_on(
    values: dict[str, Any], conversations: bool
) -> None:
    facts = facts_of("1.3.0rc29", Role.AGGREGATED, **values)
    assert (
        model_limits.TrtllmModelLimits(facts, info_of(), is_since_1_2=True).uses_conversations
        is conversations
    )


@pytest.mark.parametrize(
    ("role", "values", "said"),
    [
        (Role.AGGREGATED, {"enable_block_reuse": False}, "set sleep_config"),
        (Role.DECODE, {"sleep_config": {}, "enable_block_reuse": False}, "only aggregated workers"),
        (Role.AGGREGATED, {"sleep_config": {}}, "enable_block_reuse: false"),
        (Role.AGGREGATED, {"sleep_config": {}, "enable_block_reuse": False}, ""),
        (Role.AGGREGATED, {"sleep_config": None, "enable_block_reuse": False}, "set sleep_config"),
    ],
)
def test_sleep_not_allowed_says_what_to_set(role: Role, values: dict[str, Any], said: str) -> None:
    reuse = {name: value for name, value in values.items() if name == "enable_block_reuse"}
    rest = {name: value for name, value in values.items() if name not in reuse}
    found = engine.sleep_obstacle(facts_of("1.3.0rc29", role, kv_cache_config=reuse, **rest))
    assert said in found
    assert bool(found) is bool(said)


@pytest.mark.parametrize(
    ("version", "is_recurrent", "transceiver", "is_hinted"),
    [
        ("1.3.0rc17", True, {"backend": "UCX"}, True),
        ("1.3.0rc17", True, {"backend": "NIXL", "transceiver_runtime": "PYTHON"}, False),
        ("1.3.0rc17", False, {"backend": "UCX"}, False),
        ("1.3.0rc27", True, {"backend": "UCX"}, False),
        ("1.2.1", True, {"backend": "UCX"}, False),
    ],
)
def test_transfer_hint_names_mixed_pools_of_hybrid_models(
    version: str, is_recurrent: bool, transceiver: dict[str, Any], is_hinted: bool
) -> None:
    model = checkpoint(has_recurrent_layers=is_recurrent)
    facts = facts_of(version, Role.DECODE, model, cache_transceiver_config=transceiver)
    assert ("pull request 16505" in engine.transfer_hint(facts)) is is_hinted


def test_kv_compat_includes_preferred_attention_and_ranks() -> None:
    gemma = checkpoint(model_type="gemma4")
    transceiver = {"cache_transceiver_config": {"backend": "NIXL"}}
    found = engine.kv_compat(
        facts_of("1.3.0rc29", model=gemma, tensor_parallel_size=2, **transceiver), "1.3.0rc29"
    )
    assert (found["attn_backend"], found["tensor_parallel_size"]) == ("FLASHINFER", "2")
