"""Every TensorRT-LLM file in engine_configs/ against each release it claims, and the list of what
was not read.
"""

import re
from pathlib import Path

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.gpu import Gpu
from dynamo_trtllm.engines.manifests import Presence
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY
from dynamo_trtllm.engines.trtllm.args import TrtllmArgs, trtllm_args
from dynamo_trtllm.engines.trtllm.kernel_profiles import choose_profile
from tests.kit import trtllm_unverified_names
from tests.kit.cases import each_case

RELEASES = {release.name: release for release in LIBRARY.releases}
FILES = trtllm_unverified_names.files()
_TRUSTS = re.compile(
    rb"trust.remote.code\W{1,3}(?i:true|yes|on|1)\b|--trust.remote.code\b(?!=false)"
)
GPT_OSS = trtllm_unverified_names.ROOT / "engine_configs" / "gpt-oss-120b"


def named(value: object) -> str:
    return (
        value.relative_to(trtllm_unverified_names.ROOT / "engine_configs").as_posix()
        if isinstance(value, Path)
        else str(value)
    )


def first_release(path: Path) -> str:
    return trtllm_unverified_names.claimed(path)[0] if path.parent.name == "nixl" else "1.2.1"


def args(path: Path, release: str, sm: int = 100) -> TrtllmArgs:
    config = WorkerConfig(model_path="m", extra_engine_args=path)
    return trtllm_args(config, RELEASES[release], [Gpu(name="GPU", sm=sm, memory_bytes=1)])


def test_files_belong_to_one_engine_and_known_releases() -> None:
    assert len(FILES) >= 15
    others = set((trtllm_unverified_names.ROOT / "engine_configs").rglob("*.yaml")) - set(FILES)
    configs = trtllm_unverified_names.ROOT / "engine_configs"
    assert {path.parent.relative_to(configs).parts[0] for path in others} == {
        "tiny-gpt-oss",
        "vllm",
    }
    known = dict.fromkeys(trtllm_unverified_names.claim_of(name) for name in RELEASES)
    for path in FILES:
        claims = trtllm_unverified_names.claims(path)
        assert claims == tuple(claim for claim in known if claim in claims), path


@each_case("path", FILES)
def test_file_for_claimed_releases_has_valid_values(path: Path) -> None:
    for name in trtllm_unverified_names.claimed(path):
        uses = list(trtllm_unverified_names.arguments(path, RELEASES[name]))
        assert [use.name for use in uses if use.presence is Presence.ABSENT] == [], name
        unread = [use.name for use in uses if use.presence is Presence.NOT_READ]
        notes = [
            note
            for note in args(path, name).notes
            if "transceiver_runtime was set to CPP" not in note
        ]
        # no old spelling and no contradiction in what we ship
        assert len(notes) == len(unread), name


@each_case("folder", sorted({path.parent for path in FILES if path.stem == "prefill"}))
def test_pair_when_shipped_then_both_roles_agree_on_what_crosses(folder: Path) -> None:
    assert trtllm_unverified_names.claimed(
        folder / "prefill.yaml"
    ) == trtllm_unverified_names.claimed(folder / "decode.yaml")
    paths = [folder / f"{role}.yaml" for role in ("prefill", "decode")]
    prefill, decode = (args(path, first_release(path)) for path in paths)
    for key in (
        "cache_transceiver_config.backend",
        "cache_transceiver_config.max_tokens_in_buffer",
        "kv_cache_config.dtype",
        "kv_cache_config.tokens_per_block",
        "attn_backend",
    ):
        assert prefill.get(key) == decode.get(key), key
    buffer = prefill.get("cache_transceiver_config.max_tokens_in_buffer")
    if folder.name == "nixl":  # on the Python transceiver, which has no buffer
        assert (prefill.get("cache_transceiver_config.backend"), buffer) == ("NIXL", None)
    else:
        assert prefill.get("cache_transceiver_config.backend") == "UCX"
        assert buffer % prefill.get("kv_cache_config.tokens_per_block") == 0
    assert prefill.get("disable_overlap_scheduler") is True
    assert (prefill.get("max_seq_len") or 0) <= (decode.get("max_seq_len") or 0)


@each_case("path", FILES)
def test_file_moe_backend_fits_the_gpu_profile(path: Path) -> None:
    sm = 90 if "hopper" in path.parts else 100
    merged = args(path, first_release(path), sm)
    allowed = {*choose_profile(None, [Gpu(name="", sm=sm, memory_bytes=1)]).quantization, "AUTO"}
    assert merged.get("moe_config.backend") in allowed


@each_case("path", [path for path in FILES if path.parent.name == "nixl"])
def test_nixl_file_differs_from_ucx_in_transceiver_only(path: Path) -> None:
    """And what 1.3 chooses itself: the kernels of experts."""
    sm = 90 if "hopper" in path.parts else 100
    nixl, ucx = (
        args(config, "1.3.0rc29", sm).leaves for config in (path, path.parents[1] / path.name)
    )
    differing = {
        key for key in {*nixl, *ucx} if nixl.get(key, (None,))[0] != ucx.get(key, (None,))[0]
    }
    own = {
        f"cache_transceiver_config.{name}"
        for name in ("backend", "max_tokens_in_buffer", "transceiver_runtime")
    }
    assert own <= differing <= own | {"moe_config.backend", "attention_dp_config.enable_balance"}


@each_case(
    ("file", "expected"),
    [
        (
            "prefill.yaml",
            {
                "cuda_graph_config.max_batch_size": 32,
                "enable_attention_dp": False,
                "stream_interval": 10,
            },
        ),
        (
            "decode.yaml",
            {
                "cuda_graph_config.max_batch_size": 128,
                "enable_attention_dp": True,
                "max_num_tokens": 8192,
            },
        ),
        (
            "v0.5/prefill.yaml",
            {
                "enable_chunked_prefill": True,
                "cache_transceiver_config.max_tokens_in_buffer": 65536,
            },
        ),
        (
            "v0.5/decode.yaml",
            {
                "tensor_parallel_size": 4,
                "kv_cache_config.free_gpu_memory_fraction": 0.8,
                "max_num_tokens": 16384,
            },
        ),
        (
            "draft/prefill.yaml",
            {
                "moe_expert_parallel_size": 4,
                "max_num_tokens": 16384,
                "moe_config.backend": "CUTLASS",
            },
        ),
        (
            "k8s-agg/agg.yaml",
            {"cuda_graph_config.max_batch_size": 800, "moe_config.backend": "TRTLLM"},
        ),
        (
            "k8s-disagg/prefill.yaml",
            {"tensor_parallel_size": 1, "max_batch_size": 64, "max_seq_len": 9000},
        ),
        (
            "k8s-disagg/decode.yaml",
            {
                "tensor_parallel_size": 4,
                "max_batch_size": 1280,
                "kv_cache_config.dtype": "fp8",
                "max_seq_len": 11000,
            },
        ),
    ],
)
def test_file_when_it_is_a_guides_then_it_has_the_guides_values(
    file: str, expected: dict[str, object]
) -> None:
    merged = args(GPT_OSS / file, "1.2.1")
    assert {key: merged.get(key) for key in expected} == expected


def test_shipped_files_run_no_code_of_a_model_folder() -> None:
    folders = (
        "benchmarks",
        "deploy",
        "docs",
        "dynamo_trtllm",
        "engine_configs",
        "examples",
        "kernels_config",
        "scripts",
    )
    paths = [
        path
        for folder in folders
        for path in (trtllm_unverified_names.ROOT / folder).rglob("*")
        if path.is_file()
    ]
    texts = {
        path: path.read_bytes()
        for path in (*paths, trtllm_unverified_names.ROOT / "README.md")
        if path.suffix != ".pyc"
    }
    assert sum(path.suffix in (".yaml", ".yml") for path in texts) > 60
    assert [path for path, text in texts.items() if _TRUSTS.search(text)] == []


def test_trust_remote_code_of_a_user_reaches_the_engine(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("trust_remote_code: true\n")
    assert args(GPT_OSS / "prefill.yaml", "1.2.1").get("trust_remote_code") in (None, False)
    assert args(tmp_path / "own.yaml", "1.2.1").get("trust_remote_code") is True


def test_engine_when_it_needs_a_name_then_no_release_lacks_it() -> None:
    assert [
        use
        for use in trtllm_unverified_names.calls(LIBRARY.needed)
        if use.presence is Presence.ABSENT
    ] == []


def test_not_read_keys_equal_the_committed_page() -> None:
    for use in trtllm_unverified_names.unverified_names():
        print(f"not read: {use.release} {use.name} ({use.where})")
    assert trtllm_unverified_names.page() == trtllm_unverified_names.PAGE.read_text(
        encoding="utf-8"
    ), "run python -m tests.kit.trtllm_unverified_names and commit"
