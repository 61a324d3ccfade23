"""Values of ours that equal a release's default are not passed on: newer builds let a model class
choose then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.config.layers import find_file, read_yaml
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines import argument_schema as schema
from dynamo_trtllm.engines.gpu import Gpu
from dynamo_trtllm.engines.manifests import ApiManifest
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY, release_for
from dynamo_trtllm.engines.trtllm.args import ADAPTER, TrtllmArgs, trtllm_args
from dynamo_trtllm.engines.trtllm.kernel_profiles import BY_GPU, FALLBACK
from dynamo_trtllm.protocol.messages import Role
from tests.kit import trtllm_unverified_names
from tests.kit.cases import each_case

RELEASES = [*(release.name for release in LIBRARY.releases), "1.4.0rc1"]
GPUS = {"hopper": 90, "blackwell": 100, "blackwell-rtx": 120, "fallback": 80}
VALUES = (
    "attn_backend: TRTLLM",
    "kv_cache_config: {dtype: auto}",
    "moe_config: {backend: CUTLASS}",
)
PAIRS = sorted({path.parent for path in trtllm_unverified_names.files() if path.stem == "prefill"})


def merged(release: ApiManifest, sm: int = 80, **settings: Any) -> TrtllmArgs:
    gpus = [Gpu(name="GPU", sm=sm, memory_bytes=1)]
    return trtllm_args(WorkerConfig(model_path="m", engine="trtllm", **settings), release, gpus)


def ours_that_change_nothing(args: TrtllmArgs) -> list[str]:
    """Return the arguments of a profile or of the adapter that have the value which the release has
    anyway.
    """
    return [
        key
        for key, leaf in args.leaves.items()
        if leaf.source.startswith(("kernels profile ", ADAPTER))
        and schema.default(args.release, key, args.values) == leaf.value
    ]


def test_profiles_when_listed_then_each_has_a_gpu_here() -> None:
    assert set(GPUS) == {*BY_GPU, FALLBACK}


@each_case("sm", GPUS.values())
@each_case("release", RELEASES)
def test_args_when_nothing_is_set_then_no_default_is_passed_on(release: str, sm: int) -> None:
    args = merged(release_for(release), sm)
    assert ours_that_change_nothing(args) == []
    assert args.leaves["cuda_graph_config.enable_padding"].value is True  # false is the default


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("text", VALUES)
def test_args_equal_to_release_default_are_omitted(text: str, release: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(f"engine_args: {{{text}}}\n")
    args = merged(release_for(release), kernels_profile=str(path))
    is_default = "moe" not in text or release in ("1.0.0", "1.1.0", "1.2.1")  # 1.3 has AUTO
    assert (
        any(leaf.source == "kernels profile own" for leaf in args.leaves.values()) is not is_default
    )
    notes = [note for note in args.notes if "is not passed on" in note]
    assert len(notes) == is_default
    assert ours_that_change_nothing(args) == []


def test_args_when_a_user_sets_a_default_then_it_is_passed_on() -> None:
    args = merged(release_for("1.3.0rc29"), override_engine_args={"attn_backend": "TRTLLM"})
    assert args.values["attn_backend"] == "TRTLLM"


@pytest.mark.parametrize(("ttl_s", "is_passed_on"), [(54.5454, False), (60.0, True)])
def test_args_timeout_default_of_release_is_not_passed(ttl_s: float, is_passed_on: bool) -> None:
    args = merged(
        release_for("1.3.0rc29"),
        disaggregation_mode=Role.PREFILL,
        kv_transfer_ttl_s=ttl_s,
        override_engine_args={"cache_transceiver_config": {"backend": "NIXL"}},
    )
    key = "cache_transceiver_config.kv_transfer_timeout_ms"
    assert (key in args.leaves) is is_passed_on
    assert args.get(key) == (66_000 if is_passed_on else 60_000)


@each_case("folder", PAIRS)
def test_pair_of_different_sizes_sets_attention_backend(folder: Path) -> None:
    prefill, decode = (
        read_yaml(find_file(folder / f"{role}.yaml")) for role in ("prefill", "decode")
    )
    sizes = [file.get("tensor_parallel_size") for file in (prefill, decode)]
    # without a size, the launch lines have it: equal ones
    differ = None not in sizes and sizes[0] != sizes[1]
    assert differ is ("k8s-disagg" in folder.parts)
    for file in (prefill, decode):
        assert file.get("attn_backend") == ("TRTLLM" if differ else None)


def test_args_overridden_by_the_user_are_not_noted(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("engine_args: {attn_backend: TRTLLM}\n")
    chosen = {"attn_backend": "FLASHINFER"}
    args = merged(release_for("1.3.0rc29"), kernels_profile=str(path), override_engine_args=chosen)
    assert args.values["attn_backend"] == "FLASHINFER"
    assert [note for note in args.notes if "attn_backend" in note] == []
