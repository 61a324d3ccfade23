"""The merged arguments of a vLLM worker: what overrides what, what is refused and by which name."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines import argument_schema as schema
from dynamo_trtllm.engines.arguments import LibraryArgs
from dynamo_trtllm.engines.vllm.api_manifests import LIBRARY
from dynamo_trtllm.engines.vllm.args import CAPTURE_SIZES, vllm_args
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.worker.show_arguments import argument_table
from tests.kit.cases import each_case

CONFIGS = Path(__file__).parents[4] / "engine_configs" / "vllm"


def merged(line: str = "", environ: dict[str, str] | None = None, **settings: Any) -> LibraryArgs:
    words = ["--model", "m", "--engine", "vllm", *line.split()]
    config = load(WorkerConfig, prog="p", argv=words, environ=environ or {})
    return vllm_args(config.model_copy(update=settings) if settings else config, LIBRARY.newest)


def refused(line: str = "", **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        merged(line, **settings)
    return caught.value.message


@each_case("field", sorted(LIBRARY.flags))
def test_args_when_a_flag_is_typed_then_their_argument_is_set(field: str) -> None:
    value: Any = {"free_gpu_memory_fraction": 0.5, "load_format": "dummy"}.get(field, 2)
    flag = "--" + field.replace("_", "-")
    assert merged(f"{flag} {value}").leaves[LIBRARY.flags[field]] == (value, f"flag {flag}")


def test_args_nearest_place_wins(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("max_num_seqs: 1\nmax_model_len: 100\nblock_size: 16\nenforce_eager: true\n")
    args = merged(
        f"--extra-engine-args {path} --max-seq-len 300",
        {"DYN_TRTLLM_MAX_BATCH_SIZE": "2", "DYN_TRTLLM_MAX_SEQ_LEN": "200"},
        override_engine_args={"block_size": 64},
    )
    assert {
        key: args.leaves[key]
        for key in ("max_num_seqs", "max_model_len", "block_size", "enforce_eager")
    } == {
        "max_num_seqs": (2, "environment DYN_TRTLLM_MAX_BATCH_SIZE"),
        "max_model_len": (300, "flag --max-seq-len"),
        "block_size": (64, "--override-engine-args"),
        "enforce_eager": (True, f"YAML {path}"),
    }
    assert f"--max-seq-len 300 overrides max_model_len 100 of YAML {path}" in args.notes


@pytest.mark.parametrize("mode", ["prefill", "decode", "elastic"])
def test_args_of_a_pair_set_the_connector(mode: str) -> None:
    args = merged(f"--disaggregation-mode {mode} --kv-transfer-ttl-s 12.5")
    transfer = args.values["kv_transfer_config"]
    roles = {"prefill": "kv_producer", "decode": "kv_consumer", "elastic": "kv_both"}
    role = roles[mode]
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("NixlConnector", role)
    assert transfer["kv_load_failure_policy"] == "fail"
    assert transfer["kv_connector_extra_config"]["kv_lease_duration"] > 12.5
    assert args.get("enable_prefix_caching") is True


def test_args_when_it_is_aggregated_then_there_is_no_connector() -> None:
    args = merged("--disaggregation-mode prefill_and_decode")
    assert "kv_transfer_config" not in args.values


def test_kv_events_flag_publishes_and_needs_prefix_cache() -> None:
    assert "kv_events_config" not in merged().values
    assert (
        merged("--publish-kv-events").values["kv_events_config"]["enable_kv_cache_events"] is True
    )
    said = refused(
        "--publish-kv-events",
        override_engine_args={"kv_events_config": {"endpoint": "tcp://*:5557"}},
    )
    assert (
        "kv_events_config.endpoint is 'tcp://*:5557': set --publish-kv-events instead; remove it"
        in said
    )
    off = {"enable_prefix_caching": False}
    assert "--publish-kv-events needs enable_prefix_caching" in refused(
        "--publish-kv-events", override_engine_args=off
    )
    assert merged(override_engine_args=off).get("enable_prefix_caching") is False


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("--expert-parallel-size 4 --tensor-parallel-size 4", True),
        ("--expert-parallel-size 1 --tensor-parallel-size 4", False),
    ],
)
def test_experts_over_all_ranks_or_none_set_the_switch(line: str, wanted: bool) -> None:
    assert merged(line).values["enable_expert_parallel"] is wanted


def test_experts_data_parallel_use_all_ranks() -> None:
    args = merged(
        "--expert-parallel-size 4 --tensor-parallel-size 2",
        override_engine_args={"data_parallel_size": 2},
    )
    assert args.values["enable_expert_parallel"] is True


def test_experts_over_some_ranks_are_rejected() -> None:
    said = refused("--expert-parallel-size 2 --tensor-parallel-size 4")
    assert (
        said == "flag --expert-parallel-size is 2: vLLM distributes experts over all 4 ranks"
        " (tensor_parallel_size 4 times data_parallel_size 1) or none; set it to 4 or 1"
    )


def test_experts_when_two_places_disagree_then_refused() -> None:
    given = {"enable_expert_parallel": True}
    assert "set only one" in refused(
        "--expert-parallel-size 1 --tensor-parallel-size 4", override_engine_args=given
    )


@each_case(
    ("given", "wanted"),
    [
        ({"max_model_length": 4}, "unknown key 'max_model_length'; did you mean 'max_model_len'?"),
        (
            {"kv_transfer_config": {"kv_buffer_devise": 1}},
            "did you mean 'kv_transfer_config.kv_buffer_device'?",
        ),
        ({"max_num_seqs": "many"}, "max_num_seqs is 'many': expected a whole number or null"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0: expected 1 or more"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5: expected 0.01 to 1"),
        ({"enforce_eager": 1}, "enforce_eager is 1: expected true or false"),
        ({"moe_backend": "fp9"}, "moe_backend is 'fp9': expected one of"),
    ],
)
def test_args_unknown_to_vllm_are_rejected_by_name(given: dict[str, Any], wanted: str) -> None:
    said = refused(override_engine_args=given)
    assert said.startswith("--override-engine-args: ")
    assert wanted in said


def test_args_when_a_key_is_dotted_then_it_is_the_nested_one() -> None:
    args = merged(override_engine_args={"kv_transfer_config.kv_buffer_device": "cpu"})
    assert args.values["kv_transfer_config"]["kv_buffer_device"] == "cpu"
    assert "set --disaggregation-mode" in refused(
        override_engine_args={"kv_transfer_config.kv_role": "x"}
    )


@each_case("name", sorted(LIBRARY.foreign))
def test_args_named_as_in_another_engine_suggest_vllms(name: str) -> None:
    assert not schema.is_known(LIBRARY, name)
    assert f"{name} is an argument of the trtllm engine; with vLLM use" in refused(
        override_engine_args={name: 1}
    )


@each_case("key", sorted(LIBRARY.engine_set))
def test_args_set_by_the_engine_are_rejected_with_reason(key: str) -> None:
    given: Any = "x"
    for part in reversed(key.split(".")):
        given = {part: given}
    assert LIBRARY.engine_set[key] in refused(override_engine_args=given)


@each_case("name", sorted(LIBRARY.unsupported))
def test_args_for_several_engines_are_rejected(name: str) -> None:
    assert name in refused(override_engine_args={name: 1})


def test_names_when_looked_up_then_vllm_has_them_all() -> None:
    # a mapping with keys of the connector's own
    free = "kv_transfer_config.kv_connector_extra_config."
    names = [
        *LIBRARY.flags.values(),
        *LIBRARY.ranges,
        *LIBRARY.unsupported,
        *(key for key in LIBRARY.engine_set if not key.startswith(free)),
    ]
    assert [name for name in names if not schema.is_known(LIBRARY, name)] == []


def test_args_when_a_kernels_profile_is_named_then_refused() -> None:
    assert "profiles are for the trtllm engine" in refused("--kernels-profile hopper")


def test_args_memory_share_is_explained() -> None:
    (note,) = merged("--is-prefill-worker --free-gpu-memory-fraction 0.8").notes
    assert "a fraction of all GPU memory" in note


def test_args_when_no_role_is_said_then_a_note_says_which_it_is() -> None:
    (note,) = merged().notes
    assert "this is a decode worker" in note
    assert merged("--is-decode-worker").notes == ()


def test_print_config_shows_every_source() -> None:
    words = ["--model", "m", "--engine", "vllm", "--tensor-parallel-size", "2"]
    shown = argument_table(load(WorkerConfig, prog="p", argv=words, environ={}))
    rows = {line.split("  ")[0]: line for line in shown.splitlines()}
    assert rows["tensor_parallel_size"].endswith("flag --tensor-parallel-size")
    assert rows["enable_prefix_caching"].endswith("the vllm engine")
    assert rows["gpu_memory_utilization"].endswith(f"default (vLLM {LIBRARY.newest.name})")


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_file_merges_without_contradiction(path: Path) -> None:
    role = {"agg": "prefill_and_decode"}.get(path.stem, path.stem)
    args = merged(f"--disaggregation-mode {role} --extra-engine-args {path}")
    assert args.notes == ()


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_blocks_default_to_large_ones_with_reason(mode: str) -> None:
    args = merged(f"--disaggregation-mode {mode}")
    value, source = args.leaves["block_size"]
    assert value == 128
    assert "so that KV is transferred in large pieces" in source


@pytest.mark.parametrize("mode", ["prefill_and_decode", "elastic", "prefill", "decode"])
def test_large_steps_have_graphs(mode: str) -> None:
    found = merged(f"--disaggregation-mode {mode}").leaves[CAPTURE_SIZES]
    sizes = found.value
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, 4096)
    # A step is padded by an eighth at most, once it has more than a few tokens.
    assert all(after <= 1.125 * before for before, after in pairwise(sizes) if before >= 64)
    assert "wait for the launch of steps" in found.source


@pytest.mark.parametrize(
    "settings", [{"data_parallel_size": 2}, {"performance_mode": "interactivity"}]
)
def test_vllm_sizes_graphs_where_others_would_harm(settings: dict[str, Any]) -> None:
    args = merged("--disaggregation-mode decode", override_engine_args=settings)
    assert CAPTURE_SIZES not in args.leaves


@pytest.mark.parametrize(
    "settings",
    [
        {CAPTURE_SIZES: [8]},
        {"compilation_config": {"cudagraph_capture_sizes": [8]}},
        {"compilation_config": {"max_cudagraph_capture_size": 8}},
        {"cudagraph_capture_sizes": [8]},
        {"max_cudagraph_capture_size": 8},
    ],
)
def test_graphs_that_the_user_sizes_are_unchanged(settings: dict[str, Any]) -> None:
    command = "--disaggregation-mode elastic"
    args = merged(command, override_engine_args=settings)
    [name] = [key for key in args.leaves if "capture_size" in key]
    assert args.leaves[name].value in (8, [8])
    # Other keys of the same mapping change nothing.
    other = merged(command, override_engine_args={"compilation_config": {"mode": "none"}})
    assert other.values["compilation_config"]["mode"] == "none"
    assert other.leaves[CAPTURE_SIZES].value[-1] == 4096


@pytest.mark.parametrize(
    ("command", "settings", "expected"),
    [
        ("--disaggregation-mode prefill_and_decode", {}, None),  # vLLM's own default
        ("--disaggregation-mode prefill --kv-block-size 16", {}, 16),
        ("--disaggregation-mode decode", {"override_engine_args": {"block_size": 32}}, 32),
    ],
)
def test_blocks_set_or_not_transferred_are_unchanged(
    command: str, settings: dict[str, Any], expected: int | None
) -> None:
    args = merged(command, **settings)
    assert args.values.get("block_size") == expected
    notes = [note for note in args.notes if "block_size 128" in note]
    assert len(notes) == (expected is not None)  # says what the smaller blocks cost


def test_long_lists_are_shortened_in_the_table_of_arguments() -> None:
    words = ["--model", "m", "--engine", "vllm"]
    shown = argument_table(load(WorkerConfig, prog="p", argv=words, environ={}))
    assert "[1, 2, 4, ... 4096] (75 values)" in shown
