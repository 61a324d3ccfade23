"""Arguments of release candidates, of whose API a part was read: what is checked, and what is
passed on.
"""

from typing import Any

import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.trtllm.api_manifests import release_for
from dynamo_trtllm.engines.trtllm.args import TrtllmArgs, trtllm_args
from dynamo_trtllm.protocol.errors import ConfigError
from tests.kit.cases import each_case


def args_of(values: dict[str, Any], version: str) -> TrtllmArgs:
    return trtllm_args(
        WorkerConfig(model_path="m", override_engine_args=values), release_for(version), []
    )


@each_case(
    ("values", "name"),
    [
        ({"moe_config": {"backend": "CUTEDSL_FC12"}}, "1.3.0rc29"),
        ({"moe_config": {"backend": "CUTEDSL_FC12"}}, "1.4.0rc4"),
        ({"moe_config": {"tactic": "x", "megamoe_fuse_shared_expert": True}}, "1.4.0rc4"),
        (
            {"cache_transceiver_config": {"backend": "NIXL", "agent_bounce_buffer_enable": True}},
            "1.3.0rc28",
        ),
        (
            {"cache_transceiver_config": {"backend": "NIXL", "agent_bounce_buffer_enable": True}},
            "1.3.0rc29",
        ),
        (
            {"cache_transceiver_config": {"agent_bounce_params": {"max_chunk_size": "32MB"}}},
            "1.4.0rc4",
        ),
        ({"kv_cache_config": {"kv_cache_event_hash_algo": "v2_sha256_64"}}, "1.3.0rc29"),
        (
            {"kv_cache_config": {"host_cache_bind_to_gpu_numa_node": True, "disk_io_threads": 4}},
            "1.4.0rc4",
        ),
        (
            {
                "kv_cache_config": {
                    "cold_tier_offload_min_priority": 50,
                    "mixed_precision_first_n": 2,
                }
            },
            "1.4.0rc4",
        ),
        # its page was read up to a key before this one
        ({"kv_cache_config": {"tokens_per_block": 64}}, "1.4.0rc4"),
        ({"scheduler_config": {"waiting_queue_policy": "priority"}}, "1.3.0rc29"),
        (
            {"scheduler_config": {"context_scheduling_policy": "shortest_uncached_first"}},
            "1.4.0rc4",
        ),
        (
            {"attention_dp_config": {"kv_cache_routing_new_conv_placement": "least_prefill"}},
            "1.4.0rc4",
        ),
        ({"sleep_config": {"restore_modes": {"model": "CPU"}}}, "1.4.0rc4"),
    ],
)
def test_args_known_of_a_candidate_pass_without_note(values: dict[str, Any], name: str) -> None:
    args = args_of(values, name)
    (section,) = values
    assert args.values[section] == values[section]
    assert args.notes == ()


@each_case(
    ("key", "value", "version"),
    [
        ("moe_config.backend", "NEW", "1.3.0rc28"),
        ("moe_config.backend", "NEW", "1.4.0rc1"),
        ("cache_transceiver_config.backend", "NEW", "1.3.0rc29"),
        ("kv_cache_config.kv_cache_event_hash_algo", "v3", "1.3.0rc27"),
        ("kv_cache_config.use_kv_cache_manager_v2", "maybe", "1.4.0rc4"),  # true, false or a word
        # the class was read, its words were not
        ("scheduler_config.waiting_queue_policy", "sjf", "1.3.0rc29"),
        ("guided_decoding_backend", "outlines", "1.3.0rc29"),
    ],
)
def test_args_of_partly_read_enumeration_pass_with_note(key: str, value: str, version: str) -> None:
    section, _, name = key.partition(".")
    args = args_of({section: {name: value} if name else value}, version)
    assert args.get(key) == value
    (note,) = [note for note in args.notes if "may have more values" in note]
    assert note.startswith(
        f"{key} {value!r} is passed on unchecked: TensorRT-LLM {release_for(version).title}"
    )


@each_case(
    ("values", "version", "problem"),
    [
        (
            {"scheduler_config": {"waiting_queue_policy": "prio"}},
            "1.3.0rc27",
            "expected one of fcfs, priority",
        ),
        (
            {"scheduler_config": {"capacity_scheduler_policy": "MAX"}},
            "1.3.0rc27",
            "expected one of MAX_UTILIZATION",
        ),
        (
            {"scheduler_config": {"waiting_queue_policies": "fcfs"}},
            "1.3.0rc29",
            "did you mean 'scheduler_config.wait",
        ),
        ({"moe_config": {"backend": "CUTEDSL_FC12"}}, "1.3.0rc27", "expected one of AUTO"),
        ({"moe_config": {"backend": "NEW"}}, "1.3.0rc29", "expected one of AUTO"),
        ({"moe_config": {"backend": "NEW"}}, "1.4.0rc4", "expected one of AUTO"),
        (
            {"cache_transceiver_config": {"transceiver_runtime": "RUST"}},
            "1.3.0rc28",
            "expected one of CPP",
        ),
        # The type of a value is known, also where not all values are.
        (
            {"moe_config": {"backend": 5}},
            "1.4.0rc1",
            "moe_config.backend is 5: expected one of AUTO",
        ),
        ({"kv_cache_config": {"disk_io_threads": "4"}}, "1.4.0rc4", "expected a whole number"),
        (
            {"scheduler_config": {"enable_prefix_aware_scheduling": "no"}},
            "1.4.0rc1",
            "expected true or false",
        ),
    ],
)
def test_args_wrong_for_a_read_candidate_are_rejected(
    values: dict[str, Any], version: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        args_of(values, version)


def test_args_of_the_new_graph_class_are_known() -> None:
    assert (
        args_of({"cuda_graph_config": {"mode": "decode"}}, "1.3.0rc27").values["cuda_graph_config"][
            "mode"
        ]
        == "decode"
    )
    with pytest.raises(ConfigError, match=r"did you mean 'cuda_graph_config.max_batch_size'"):
        args_of({"cuda_graph_config": {"max_batchsize": 3}}, "1.3.0rc27")


@pytest.mark.parametrize("version", ["1.3.0rc13", "1.3.0rc26"])
def test_args_possible_in_older_candidate_pass_with_note(version: str) -> None:
    args = args_of({"sampler_type": "auto"}, version)
    assert args.values["sampler_type"] == "auto"
    assert args.notes == (
        (
            "sampler_type is passed on unchecked: TensorRT-LLM 1.3.0rc27 (the nearest release that"
            " was read) has no such argument (it is in 1.1.0, 1.2.1)"
        ),
    )
