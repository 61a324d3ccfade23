"""The arguments of `LLM`: from which place each comes, and what is refused before anything
loads.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines import argument_schema as schema
from dynamo_trtllm.engines.gpu import Gpu
from dynamo_trtllm.engines.manifests import ApiManifest, Presence
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY
from dynamo_trtllm.engines.trtllm.args import TrtllmArgs, trtllm_args
from dynamo_trtllm.protocol.errors import ConfigError
from tests.kit.cases import each_case

RELEASES = {release.name: release for release in LIBRARY.releases}
HOPPER = [Gpu(name="H100", sm=90, memory_bytes=80 << 30)]


def release(name: str = "1.2.1") -> ApiManifest:
    return RELEASES[name]


def merged(name: str = "1.2.1", gpus: list[Gpu] | None = None, **settings: Any) -> TrtllmArgs:
    """The arguments of a worker whose configuration was built in code, as seen by a release."""
    return trtllm_args(WorkerConfig(model_path="m", **settings), release(name), gpus or [])


def override(values: dict[str, Any], name: str = "1.2.1") -> TrtllmArgs:
    return merged(name, override_engine_args=values)


@pytest.fixture
def yaml(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "e.yaml"
        path.write_text(text)
        return path

    return write


def typed(argv: list[str], env: dict[str, str] | None = None) -> WorkerConfig:
    return load(WorkerConfig, prog="w", argv=["--model", "m", *argv], environ=env or {})


def test_args_of_every_place_are_merged_in_order(yaml: Any) -> None:
    path = yaml(
        "max_batch_size: 1\nmax_num_tokens: 1\nmax_seq_len: 1\nstream_interval: 1\n"
        "moe_config: {backend: CUTLASS}\nkv_cache_config: {enable_block_reuse: false}\n"
    )
    config = typed(
        [
            "--extra-engine-args",
            str(path),
            "--max-num-tokens=3",
            "--max-seq-len=3",
            '--override-engine-args={"max_seq_len":4}',
        ],
        {"DYN_TRTLLM_MAX_BATCH_SIZE": "2", "DYN_TRTLLM_MAX_NUM_TOKENS": "2"},
    )
    args = trtllm_args(config, release(), HOPPER)
    assert args.leaves == {
        "enable_iter_perf_stats": (True, "the trtllm engine"),
        "moe_config.backend": ("CUTLASS", f"YAML {path}"),
        "cuda_graph_config.enable_padding": (True, "kernels profile hopper"),
        "stream_interval": (1, f"YAML {path}"),
        "kv_cache_config.enable_block_reuse": (False, f"YAML {path}"),
        "max_batch_size": (2, "environment DYN_TRTLLM_MAX_BATCH_SIZE"),
        "max_num_tokens": (3, "flag --max-num-tokens"),
        "max_seq_len": (4, "--override-engine-args"),
    }
    assert args.values["kv_cache_config"] == {"enable_block_reuse": False}
    assert args.notes == (
        f"environment DYN_TRTLLM_MAX_BATCH_SIZE 2 overrides max_batch_size 1 of YAML {path}",
        f"--max-num-tokens 3 overrides max_num_tokens 1 of YAML {path}",
        f"--max-seq-len 3 overrides max_seq_len 1 of YAML {path}",
        "--override-engine-args 4 overrides max_seq_len 3 of flag --max-seq-len",
    )


@each_case("field", sorted(LIBRARY.flags))
def test_args_when_a_flag_is_typed_then_their_argument_is_set(field: str) -> None:
    others = {
        "load_format": "dummy",
        "enable_attention_dp": True,
        "guided_decoding_backend": "xgrammar",
    }
    value = {"free_gpu_memory_fraction": 0.5, **others}.get(field, 2)
    assert merged(**{field: value}).leaves[LIBRARY.flags[field]] == (value, "configuration")


def test_flags_set_arguments_of_every_release() -> None:
    assert LIBRARY.flags["expert_parallel_size"] == "moe_expert_parallel_size"
    assert LIBRARY.flags["kv_block_size"] == "kv_cache_config.tokens_per_block"
    for release in LIBRARY.releases:
        assert {schema.find(release, key).presence for key in LIBRARY.flags.values()} == {
            Presence.PRESENT
        }


# --- keys -----------------------------------------------------------------------------------------


@each_case(
    ("values", "problem"),
    [
        ({"max_batchsize": 1}, r"unknown key 'max_batchsize'; did you mean 'max_batch_size'\?"),
        (
            {"kv_cache_config": {"dtyp": "fp8"}},
            r"unknown key 'kv_cache_config.dtyp'; did you mean 'kv_cache_config.dtype'",
        ),
        ({"moe_config": {"zzz": 1}}, "unknown key 'moe_config.zzz'; known: backend, "),
        (
            {"scheduler_config": {"dynamic_batch_config": {"zzz": 1}}},
            "known: dynamic_batch_moving_average_window",
        ),
        ({"model": "m"}, "model is 'm': set --model-path instead; remove it"),
        ({"backend": "tensorrt"}, "backend is 'tensorrt': only pytorch is supported; remove it"),
    ],
)
def test_args_unknown_key_suggests_the_nearest(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        override(values)
    assert caught.value.message.startswith("--override-engine-args: ")


@pytest.mark.parametrize(
    ("values", "name", "having"),
    [
        (
            {"cache_transceiver_config": {"kv_transfer_timeout_ms": 5}},
            "1.1.0",
            r"a release that has it \(1.2.1, 1.3.0rc27, 1.3.0rc28, 1.3.0rc29, 1.4.0rc4\)",
        ),
        (
            {"num_serve_frontends": 2},
            "1.2.1",
            r"a release that has it \(1.3.0rc27, 1.3.0rc28, 1.3.0rc29, 1.4.0rc4\)",
        ),
        ({"build_config": None}, "1.3.0rc27", r"a release that has it \(1.1.0\)"),
        (
            {"cache_transceiver_config": {"agent_bounce_buffer_enable": True}},
            "1.3.0rc27",
            r"a release that has it \(1.3.0rc28, 1.3.0rc29, 1.4.0rc4\)",
        ),
        ({"moe_config": {"tactic": "x"}}, "1.3.0rc29", r"a release that has it \(1.4.0rc4\)"),
    ],
)
def test_args_key_of_other_releases_names_them(
    values: dict[str, Any], name: str, having: str
) -> None:
    with pytest.raises(ConfigError, match=having):
        override(values, name)


def test_args_when_the_file_is_at_fault_then_it_is_named(yaml: Any) -> None:
    path = yaml("max_batchsize: 1")
    with pytest.raises(ConfigError, match=f"YAML {path}: unknown key"):
        merged(extra_engine_args=path)


def test_args_when_a_part_was_not_read_then_passed_on_and_said() -> None:
    args = override({"kv_cache_config": {"kv_pool_rebalance_ratio_threshold": 5}}, "1.4.0rc4")
    assert args.values["kv_cache_config"]["kv_pool_rebalance_ratio_threshold"] == 5
    assert args.notes == (
        (
            "kv_cache_config.kv_pool_rebalance_ratio_threshold is passed on unchecked: its schema"
            " in TensorRT-LLM 1.4.0rc4 is unknown (it is in an unreleased commit)"
        ),
    )
    (note,) = override({"scheduler_config": {"capacity_scheduler_policy": "x"}}, "1.1.0").notes
    assert note.endswith(
        "TensorRT-LLM 1.1.0 is unknown (it is in 1.2.1, 1.3.0rc27, 1.3.0rc28, 1.3.0rc29, 1.4.0rc4)"
    )


# --- values ---------------------------------------------------------------------------------------


@each_case(
    ("values", "problem"),
    [
        ({"max_batch_size": "8"}, "max_batch_size is '8': expected a whole number or null"),
        ({"max_batch_size": True}, "expected a whole number"),
        ({"max_batch_size": 1.5}, "expected a whole number"),
        ({"enable_attention_dp": 1}, "expected true or false"),
        ({"enable_attention_dp": "yes"}, "expected true or false"),
        ({"kv_cache_config": 3}, r"expected a mapping \(key: value\)"),
        ({"kv_cache_config": None}, r"kv_cache_config is None: expected a mapping"),
        ({"kv_cache_config": {"free_gpu_memory_fraction": "0.9"}}, "expected a number or null"),
        ({"kv_cache_config": {"free_gpu_memory_fraction": 1.5}}, "1.5: expected 0 to 1"),
        (
            {"kv_cache_config": {"max_attention_window": []}},
            "expected a list of numbers, each 1 or more",
        ),
        (
            {"kv_cache_config": {"max_attention_window": [128, 0]}},
            "expected a list of numbers, each 1 or more",
        ),
        ({"kv_cache_config": {"max_attention_window": [1.5]}}, "expected a list of int"),
        (
            {"moe_config": {"backend": "TRITTON"}},
            "expected one of CUTLASS, CUTEDSL, WIDEEP, TRTLLM",
        ),
        (
            {"cache_transceiver_config": {"backend": "RDMA"}},
            "expected one of DEFAULT, UCX, NIXL, MOONCAKE, MPI or null",
        ),
        ({"cache_transceiver_config": {"kv_transfer_timeout_ms": 0}}, "expected 1 or more"),
        (
            {"scheduler_config": {"capacity_scheduler_policy": "GREEDY"}},
            "one of MAX_UTILIZATION, GUARANTEED_NO_EVICT",
        ),
        ({"load_format": "gms"}, "expected one of AUTO, DUMMY, VISION_ONLY"),
        ({"stream_interval": 0}, "expected 1 or more"),
        ({"batch_wait_max_tokens_ratio": 2}, "expected 0 to 1"),
        ({"batch_wait_timeout_ms": -1}, "expected 0 or more"),
        ({"tensor_parallel_size": 0}, "expected 1 or more"),
        (
            {"cuda_graph_config": {"batch_sizes": [1, 2], "max_batch_size": 4}},
            "Set only one of them",
        ),
        (
            {"attention_dp_config": {"enable_balance": True, "timeout_iters": -1}},
            "expected 0 or more with enable_balance",
        ),
        ({"orchestrator_type": "mpi"}, "one of rpc, ray or null"),
    ],
)
def test_args_wrong_value_says_what_is_right(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        override(values)


@each_case(
    "values",
    [
        {"cuda_graph_config": None},
        {"cuda_graph_config": {"batch_sizes": [1, 2, 4], "max_batch_size": 4}},
        {"cache_transceiver_config": {"backend": None}},
        {"load_format": "dummy"},
        {"env_overrides": {"A.B": "1", "C": "2"}},
        {"kv_cache_config": {"free_gpu_memory_fraction": 1, "max_attention_window": [128, 4096]}},
        # a class that was not read takes any key
        {"speculative_config": {"decoding_type": "Eagle"}},
        {"attention_dp_config": {"timeout_iters": -1}},
        {"batch_wait_timeout_ms": 3},
    ],
)
def test_args_when_values_are_right_then_they_are_passed_on(values: dict[str, Any]) -> None:
    args = merged(override_engine_args=values)
    for key, value in values.items():
        assert args.values[key] == (
            {"enable_padding": True, **value} if key == "cuda_graph_config" and value else value
        )


def test_args_literal_of_another_release_is_rejected() -> None:
    values = {"moe_config": {"backend": "WIDEEP"}}
    assert override(values, "1.1.0").values["moe_config"] == {"backend": "WIDEEP"}
    with pytest.raises(ConfigError, match="'WIDEEP': expected one of AUTO"):
        override(values, "1.3.0rc27")


# --- old spellings --------------------------------------------------------------------------------


@each_case(
    ("old", "new", "said"),
    [
        (
            {"kv_cache_free_gpu_memory_fraction": 0.7},
            {"kv_cache_config": {"free_gpu_memory_fraction": 0.7}},
            (
                "kv_cache_free_gpu_memory_fraction is deprecated; use"
                " kv_cache_config.free_gpu_memory_fra"
            ),
        ),
        (
            {"cache_transceiver_config": {"backend": "nixl"}},
            {"cache_transceiver_config": {"backend": "NIXL"}},
            "cache_transceiver_config.backend: nixl is deprecated; use NIXL",
        ),
        (
            {"enable_overlap_scheduler": False},
            {"disable_overlap_scheduler": True},
            "enable_overlap_scheduler is deprecated; use disable_overlap_scheduler: true",
        ),
        ({"use_cuda_graph": False}, {"cuda_graph_config": None}, "use cuda_graph_config: null"),
        (
            {"use_cuda_graph": True, "cuda_graph_max_batch_size": 8},
            {"cuda_graph_config": {"max_batch_size": 8, "enable_padding": True}},
            "use_cuda_graph is deprecated; use cuda_graph_config, which is on by default",
        ),
        (
            {"cuda_graph_padding_enabled": False, "cuda_graph_batch_sizes": [1, 2]},
            {"cuda_graph_config": {"batch_sizes": [1, 2], "enable_padding": False}},
            "cuda_graph_padding_enabled is deprecated; use cuda_graph_config.enable_padding: false",
        ),
        (
            {"moe_backend": "TRTLLM"},
            {"moe_config": {"backend": "TRTLLM"}},
            "use moe_config.backend: TRTLLM",
        ),
        (
            {"pytorch_backend_config": {"print_iter_log": True, "enable_overlap_scheduler": True}},
            {"print_iter_log": True, "disable_overlap_scheduler": False},
            "pytorch_backend_config.print_iter_log is deprecated; use print_iter_log: true",
        ),
    ],
)
@each_case("name", RELEASES)
def test_args_old_spelling_is_translated(
    old: dict[str, Any], new: dict[str, Any], said: str, name: str
) -> None:
    args = override(old, name)
    assert {key: args.values[key] for key in new} == new
    assert [note for note in args.notes if said in note]
    assert args.leaves.keys() & old.keys() <= new.keys()


def test_args_pytorch_backend_is_left_to_the_engine() -> None:
    args = override({"backend": "pytorch"})
    assert "backend" not in args.values
    assert args.notes == ()


@pytest.mark.parametrize(
    "values",
    [
        {"enable_overlap_scheduler": True, "disable_overlap_scheduler": True},
        {"moe_backend": "TRTLLM", "moe_config": {"backend": "CUTLASS"}},
        {"use_cuda_graph": True, "cuda_graph_config": None},
        {"pytorch_backend_config": {"stream_interval": 2}, "stream_interval": 3},
    ],
)
def test_args_when_both_spellings_disagree_then_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="have different values"):
        override(values)


def test_args_when_both_spellings_agree_then_taken() -> None:
    values = {"enable_overlap_scheduler": True, "disable_overlap_scheduler": False}
    assert override(values).values["disable_overlap_scheduler"] is False


# --- the kernels profile --------------------------------------------------------------------------


def test_args_profile_key_the_release_lacks_is_omitted(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("engine_args: {moe_config: {backend: MARLIN}}")  # came with 1.3
    args = merged(kernels_profile=str(path))
    assert "moe_config.backend" not in args.leaves
    (note,) = args.notes
    assert note.startswith(
        "kernels profile p: moe_config.backend is 'MARLIN': expected one of CUTLASS"
    )
    assert note.endswith("; dropped")


def test_args_profile_key_of_no_release_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("engine_args: {num_serve_frontends: 2}")
    args = merged(kernels_profile=str(path))
    assert set(args.values) == {"enable_iter_perf_stats"}
    assert args.notes == (
        (
            "kernels profile p: num_serve_frontends is dropped: TensorRT-LLM 1.2.1 has no such"
            " argument"
        ),
    )
    path.write_text("engine_args: {num_serve_frontend: 2}")
    with pytest.raises(ConfigError, match="kernels profile p: unknown key 'num_serve_frontend'"):
        merged(kernels_profile=str(path))


CHECKPOINT = {
    "model_type": "mixtral",
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "vocab_size": 8,
}


@pytest.mark.parametrize("quantization", [None, "mxfp4"])
def test_args_without_mxfp4_keep_their_experts(quantization: str | None, tmp_path: Path) -> None:
    described = CHECKPOINT | (
        {"quantization_config": {"quant_method": quantization}} if quantization else {}
    )
    (tmp_path / "config.json").write_text(json.dumps(described))
    args = trtllm_args(WorkerConfig(model_path=str(tmp_path)), release(), HOPPER)
    # CUTLASS is the default
    assert args.get("moe_config.backend") == ("TRITON" if quantization else "CUTLASS")
    assert args.leaves["cuda_graph_config.enable_padding"].source == "kernels profile hopper"


def test_args_with_graphs_off_override_the_profile() -> None:
    assert override({"cuda_graph_config": None}).values["cuda_graph_config"] is None


def test_args_sizes_of_the_user_override_the_profile(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("engine_args: {cuda_graph_config: {max_batch_size: 64}}")
    args = merged(
        kernels_profile=str(path),
        override_engine_args={"cuda_graph_config": {"batch_sizes": [1, 2]}},
    )
    assert args.values["cuda_graph_config"] == {"batch_sizes": [1, 2]}


# --- get ------------------------------------------------------------------------------------------


@each_case(
    ("key", "value"),
    [
        ("max_batch_size", 4),
        ("max_num_tokens", 8192),  # default
        ("kv_cache_config.tokens_per_block", 32),  # default of a part that is always there
        ("cache_transceiver_config.backend", "UCX"),
        # default, now that the part is there
        ("cache_transceiver_config.kv_transfer_sender_future_timeout_ms", 1000),
        ("cache_transceiver_config", {"backend": "UCX"}),
        ("attention_dp_config.timeout_iters", None),  # the part is off
        ("cuda_graph_config.max_batch_size", None),  # switched off
        ("load_format", "AUTO"),
        ("num_serve_frontends", None),  # of another release
    ],
)
def test_get_when_asked_then_the_value_or_the_default(key: str, value: Any) -> None:
    values = {
        "max_batch_size": 4,
        "cache_transceiver_config": {"backend": "UCX"},
        "cuda_graph_config": None,
    }
    assert override(values).get(key) == value


def test_get_when_no_release_has_the_key_then_an_error() -> None:
    with pytest.raises(KeyError):
        merged().get("kv_cache_config.fraction")
