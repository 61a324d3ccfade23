"""The manifests of TensorRT-LLM's releases: untouched, and read for what they say and what they do not say."""

import hashlib
import logging
from importlib import resources

import pytest

from dynamo_trtllm.engines.manifests import ApiManifest, Presence
from dynamo_trtllm.engines.trtllm import api_manifests
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY, release_for
from dynamo_trtllm.errors import ConfigError

SHA256 = {
    "1.1.0.json": "16dcdfd5f8229f4dc0592f428f887bf3aa45d8cbd696c115ee5b61f4cd754806",
    "1.2.1.json": "c601a7fa0c7ccb9fcdae73570b14e6b5b77f57d4047a6aa14b4b300eb86377a6",
    "1.3.0rc-unpinned.json": "2a37a5a479da95d3cc5c8cf6c3c83b664057119a73993f94221e21263caef656",
    "1.3.0rc27.json": "4a0646c32dd4c18c61a14d2fa967dc81ea3238b224a071f4801a458a786e6c7e",
    "1.3.0rc29.json": "0b35204a7aec54959bb3a592c2dbfe2d151e64bd4cfee3c742f947e0dca922c9",
}


def by_name(name: str) -> ApiManifest:
    return next(release for release in LIBRARY.releases if release.name == name)


def test_manifests_when_compared_with_what_was_read_then_byte_for_byte_the_same() -> None:
    shipped = [file for file in resources.files(api_manifests.__name__).iterdir() if file.name.endswith(".json")]
    assert {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in shipped} == SHA256


def test_releases_when_listed_then_oldest_first_and_the_candidate_says_what_was_read() -> None:
    assert [release.name for release in LIBRARY.releases] == ["1.1.0", "1.2.1", "1.3.0rc"]
    assert [release.title for release in LIBRARY.releases][1:] == [
        "1.2.1",
        "1.3.0rc (arguments as of 1.3.0rc27, calls as of 1.3.0rc29)",
    ]


@pytest.mark.parametrize(
    ("owner", "name", "expected"),
    [
        ("TorchLlmArgs", "max_num_tokens", "PRESENT PRESENT PRESENT"),
        ("TorchLlmArgs", "build_config", "PRESENT ABSENT ABSENT"),
        ("TorchLlmArgs", "num_serve_frontends", "ABSENT ABSENT PRESENT"),
        ("KvCacheConfig", "tokens_per_block", "PRESENT PRESENT PRESENT"),
        ("KvCacheConfig", "avg_seq_len", "ABSENT ABSENT NOT_READ"),  # read in part only
        ("SchedulerConfig", "capacity_scheduler_policy", "NOT_READ PRESENT NOT_READ"),
        ("DecodeCudaGraphConfig", "mode", "NOT_READ NOT_READ PRESENT"),
        ("DisaggregatedParams", "disagg_request_id", "ABSENT ABSENT PRESENT"),
        ("SamplingParams", "end_id", "PRESENT PRESENT PRESENT"),
        ("CompletionOutput", "token_ids_diff", "NOT_READ PRESENT PRESENT"),
        ("GenerationResult", "abort", "NOT_READ PRESENT NOT_READ"),
        ("LLM", "generate_async", "PRESENT PRESENT PRESENT"),
        ("LLM", "shutdown", "NOT_READ PRESENT NOT_READ"),
        ("LLM", "shut_down", "ABSENT ABSENT ABSENT"),
        ("LLM.generate_async", "cache_salt", "PRESENT PRESENT PRESENT"),
        ("LLM.generate_async", "priority", "ABSENT ABSENT PRESENT"),
        ("LLM.get_stats", "timeout", "NOT_READ PRESENT NOT_READ"),
        ("GuidedDecodingParams", "json", "NOT_READ NOT_READ NOT_READ"),  # named as a type, nowhere read
        ("LLMs", "generate_async", "ABSENT ABSENT ABSENT"),
    ],
)
def test_presence_when_asked_of_each_release_then_what_its_manifest_says(owner: str, name: str, expected: str) -> None:
    assert " ".join(release.presence(owner, name).name for release in LIBRARY.releases) == expected


def test_presence_when_a_name_is_misspelt_in_a_class_that_was_read_then_absent() -> None:
    assert by_name("1.2.1").presence("CompletionOutput", "tokenids") is Presence.ABSENT


def test_fields_when_read_then_type_default_and_allowed_values_are_there() -> None:
    release = by_name("1.2.1")
    backend = release.fields("CacheTransceiverConfig")["backend"]
    assert backend.type == "Optional[Literal['DEFAULT', 'UCX', 'NIXL', 'MOONCAKE', 'MPI']]"
    assert backend.default is None
    assert release.fields("TorchLlmArgs")["model"].required
    assert release.fields("KvCacheConfig")["free_gpu_memory_fraction"].default == 0.9
    assert release.fields("TorchLlmArgs")["load_format"].default == "AUTO"
    assert release.fields("LLM.generate_async")["inputs"].required
    assert not release.fields("LLM.generate_async")["streaming"].required
    assert release.values("CapacitySchedulerPolicy") == ("MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH")
    assert release.fields("NoSuchClass") == {}


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("1.1.0.post1", "1.1.0"),
        ("1.1.0rc5", "1.1.0"),
        ("1.2.0", "1.2.1"),
        ("1.2.1+cu130", "1.2.1"),
        ("1.3.0rc29", "1.3.0rc"),
        ("1.3.0", "1.3.0rc"),
    ],
)
def test_release_for_when_the_minor_line_is_known_then_its_release(version: str, name: str) -> None:
    assert release_for(version).name == name


def test_release_for_when_newer_than_all_known_then_the_newest_and_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert release_for("2.0.1").name == "1.3.0rc"
    assert "TensorRT-LLM 2.0.1 is unknown; using the argument schema of 1.3.0rc" in caplog.text


def test_release_for_when_a_1_4_candidate_then_names_that_1_3_lacks_may_exist() -> None:
    release = release_for("1.4.0rc1")
    assert release.presence("CacheTransceiverConfig", "agent_bounce_buffer_enable") is Presence.NOT_READ
    assert release.presence("TorchLlmArgs", "iter_perf_stats_interval") is Presence.NOT_READ
    assert release.presence("CacheTransceiverConfig", "transceiver_runtime") is Presence.PRESENT
    assert by_name("1.3.0rc").presence("TorchLlmArgs", "iter_perf_stats_interval") is Presence.ABSENT


@pytest.mark.parametrize("version", ["0.21.0", "1.0.0", "1.0.0.post1"])
def test_release_for_when_too_old_then_refused_with_the_oldest_that_works(version: str) -> None:
    with pytest.raises(ConfigError, match=f"TensorRT-LLM {version} is too old. Install 1.1.0 or newer."):
        release_for(version)


def test_release_for_when_it_is_no_version_then_refused() -> None:
    with pytest.raises(ConfigError, match="Invalid TensorRT-LLM version 'none'"):
        release_for("none")
