"""The manifests of TensorRT-LLM's releases: untouched, and read for what they say and what they do
not say.
"""

import hashlib
import logging
from importlib import resources

import pytest

from dynamo_trtllm.engines.manifests import ApiManifest, Presence
from dynamo_trtllm.engines.trtllm import api_manifests
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY, release_for
from dynamo_trtllm.protocol.errors import ConfigError
from tests.kit.cases import each_case

SHA256 = {
    "1.1.0.json": "16dcdfd5f8229f4dc0592f428f887bf3aa45d8cbd696c115ee5b61f4cd754806",
    "1.2.1.json": "c601a7fa0c7ccb9fcdae73570b14e6b5b77f57d4047a6aa14b4b300eb86377a6",
    "1.3.0rc-unpinned.json": "2a37a5a479da95d3cc5c8cf6c3c83b664057119a73993f94221e21263caef656",
    "1.3.0rc27.json": "7cd750032fb404a374fdf6294ac356215825365217400d2878c0ba1ab44c7875",
    "1.3.0rc28.json": "ea779f34b4cfdee63fb4408e50f6cae6ba78376d2d0a6af6cf92c47157e93d28",
    "1.3.0rc29.json": "41edff1356a817ee76ffd29e66bc06bce3fdf9e0d36168d66d97eb97dadc6170",
    "1.4.0rc4.json": "8cd709537e665b0a59fba509ddf758aba9e0f47b2f7c69c51e38874206be8871",
}


def by_name(name: str) -> ApiManifest:
    return next(release for release in LIBRARY.releases if release.name == name)


def test_manifests_equal_what_was_read() -> None:
    shipped = [
        file
        for file in resources.files(api_manifests.__name__).iterdir()
        if file.name.endswith(".json")
    ]
    assert {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in shipped} == SHA256


def test_releases_when_listed_then_oldest_first() -> None:
    assert [release.name for release in LIBRARY.releases] == [
        "1.1.0",
        "1.2.1",
        "1.3.0rc27",
        "1.3.0rc28",
        "1.3.0rc29",
        "1.4.0rc4",
    ]


P = "PRESENT"
A = "ABSENT"
N = "NOT_READ"


@each_case(
    ("owner", "name", "expected"),
    [
        ("TorchLlmArgs", "max_num_tokens", (P, P, P, P, P, P)),
        ("TorchLlmArgs", "build_config", (P, A, A, A, N, N)),
        ("TorchLlmArgs", "num_serve_frontends", (A, A, P, P, P, P)),
        ("TorchLlmArgs", "enable_tokenization_cache", (A, A, A, P, P, P)),
        ("TorchLlmArgs", "iter_perf_stats_interval", (A, A, A, A, N, N)),
        ("KvCacheConfig", "tokens_per_block", (P, P, P, P, P, P)),
        # rc27 was read in part, and rc29 fills the gap
        ("KvCacheConfig", "avg_seq_len", (A, A, P, P, P, P)),
        ("KvCacheConfig", "host_cache_bind_to_gpu_numa_node", (A, A, N, A, A, P)),
        ("KvCacheConfig", "mixed_precision_first_n", (A, A, N, A, A, P)),
        ("CacheTransceiverConfig", "agent_bounce_buffer_enable", (A, A, A, P, P, P)),
        ("CacheTransceiverConfig", "agent_bounce_params", (A, A, A, P, P, P)),
        ("MoeConfig", "tactic", (A, A, A, N, A, P)),
        ("SchedulerConfig", "capacity_scheduler_policy", (N, P, P, P, P, P)),
        ("SchedulerConfig", "gen_preemption", (N, A, A, A, A, P)),
        ("SleepConfig", "restore_modes", (N, N, N, N, N, P)),
        ("DecodeCudaGraphConfig", "mode", (N, N, P, P, P, P)),
        ("DisaggregatedParams", "disagg_request_id", (A, A, P, P, P, P)),
        ("DisaggregatedParams", "remote_tail_start", (A, A, N, N, A, P)),
        ("SamplingParams", "end_id", (P, P, P, P, P, P)),
        ("SamplingParams", "endid", (A, A, N, N, A, N)),
        ("CompletionOutput", "token_ids_diff", (N, P, P, P, P, P)),
        ("GenerationResult", "abort", (N, P, N, N, N, N)),
        ("LLM", "generate_async", (P, P, P, P, P, P)),
        ("LLM", "shutdown", (N, P, N, N, N, N)),
        ("LLM", "shut_down", (A, A, N, N, A, N)),
        ("LLM.generate_async", "cache_salt", (P, P, P, P, P, P)),
        ("LLM.generate_async", "priority", (A, A, P, P, P, P)),
        ("LLM.get_stats", "timeout", (N, P, N, N, N, N)),
        ("GuidedDecodingParams", "json", (N, N, N, N, N, N)),  # named as a type, nowhere read
        ("LLMs", "generate_async", (A, A, A, A, A, A)),
    ],
)
def test_presence_in_each_release_follows_its_manifests(
    owner: str, name: str, expected: tuple[str, ...]
) -> None:
    assert tuple(release.presence(owner, name).name for release in LIBRARY.releases) == expected


def test_presence_of_misspelled_name_is_absent() -> None:
    assert by_name("1.2.1").presence("CompletionOutput", "tokenids") is Presence.ABSENT


def test_fields_have_type_default_and_allowed_values() -> None:
    release = by_name("1.2.1")
    backend = release.fields("CacheTransceiverConfig")["backend"]
    assert backend.type == "Optional[Literal['DEFAULT', 'UCX', 'NIXL', 'MOONCAKE', 'MPI']]"
    assert backend.default is None
    assert release.fields("TorchLlmArgs")["model"].required
    assert release.fields("KvCacheConfig")["free_gpu_memory_fraction"].default == 0.9
    assert release.fields("TorchLlmArgs")["load_format"].default == "AUTO"
    assert release.fields("LLM.generate_async")["inputs"].required
    assert not release.fields("LLM.generate_async")["streaming"].required
    assert release.values("CapacitySchedulerPolicy") == (
        "MAX_UTILIZATION",
        "GUARANTEED_NO_EVICT",
        "STATIC_BATCH",
    )
    assert release.fields("NoSuchClass") == {}


@each_case(
    ("version", "name"),
    [
        ("1.1.0.post1", "1.1.0"),
        ("1.1.0rc5", "1.1.0"),
        ("1.2.0", "1.2.1"),
        ("1.2.1+cu130", "1.2.1"),
        ("1.3.0rc27", "1.3.0rc27"),
        ("1.3.0rc28", "1.3.0rc28"),
        ("1.3.0rc29", "1.3.0rc29"),
        ("1.3.0rc29+cu130", "1.3.0rc29"),
        ("1.4.0rc4", "1.4.0rc4"),
    ],
)
def test_release_for_a_read_release_is_that_one(version: str, name: str) -> None:
    release = release_for(version)
    assert release.name == release.title == name
    assert release.not_read == by_name(name).not_read


@each_case(
    ("version", "name"),
    [
        ("1.3.0rc12", "1.3.0rc27"),
        ("1.3.0rc26", "1.3.0rc27"),
        ("1.3.0rc27.post1", "1.3.0rc27"),
        ("1.3.0rc30", "1.3.0rc29"),
        ("1.3.0", "1.3.0rc29"),
        ("1.3.1", "1.3.0rc29"),
        ("1.4.0rc0", "1.4.0rc4"),
        ("1.4.0rc1", "1.4.0rc4"),
        ("1.4.0rc5", "1.4.0rc4"),
        ("1.4.0", "1.4.0rc4"),
    ],
)
def test_release_for_unread_candidate_is_the_nearest(version: str, name: str) -> None:
    release = release_for(version)
    assert release.name == name
    assert release.title == f"{name} (the nearest release that was read)"
    assert all(release.is_in_part(owner) for owner in release.owners)
    assert release.open_enums == frozenset(release.enums)
    assert release.presence("MoeConfig", "no_such_name") is Presence.NOT_READ
    assert release.presence("MoeConfig", "backend") is Presence.PRESENT
    assert not by_name("1.3.0rc27").is_in_part("TorchLlmArgs")  # as before


def test_release_for_a_newer_one_is_the_newest_known(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert release_for("2.0.1").name == "1.4.0rc4"
    assert "TensorRT-LLM 2.0.1 is unknown; using the argument schema of 1.4.0rc4" in caplog.text


def test_fields_of_candidates_have_their_own_defaults() -> None:
    runtimes = {
        release.name: release.fields("CacheTransceiverConfig")["transceiver_runtime"].default
        for release in LIBRARY.releases[2:]
    }
    assert runtimes == {
        "1.3.0rc27": "auto",
        "1.3.0rc28": "auto",
        "1.3.0rc29": "auto",
        "1.4.0rc4": "PYTHON",
    }
    assert by_name("1.3.0rc27").values("WaitingQueuePolicy") == ("fcfs", "priority")
    # SchedulerConfig of rc29 was read, its enumeration was not.
    assert "WaitingQueuePolicy" in by_name("1.3.0rc29").open_enums - by_name("1.3.0rc27").open_enums


@pytest.mark.parametrize("version", ["0.21.0", "1.0.0", "1.0.0.post1"])
def test_release_for_too_old_names_the_oldest_supported(version: str) -> None:
    with pytest.raises(
        ConfigError, match=f"TensorRT-LLM {version} is too old. Install 1.1.0 or newer."
    ):
        release_for(version)


def test_release_for_when_it_is_no_version_then_refused() -> None:
    with pytest.raises(ConfigError, match="Invalid TensorRT-LLM version 'none'"):
        release_for("none")
