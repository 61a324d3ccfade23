"""Which profile is chosen for which GPUs, and that a profile never overrides the user."""

import logging
import os
from pathlib import Path

import pytest

from dynamo_trtllm.config import layers
from dynamo_trtllm.engines import argument_schema as schema
from dynamo_trtllm.engines.gpu import Gpu
from dynamo_trtllm.engines.trtllm import kernel_profiles
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY
from dynamo_trtllm.engines.trtllm.kernel_profiles import KernelProfile, choose_profile
from dynamo_trtllm.protocol.errors import ConfigError
from tests.kit.cases import each_case

SHIPPED = (*kernel_profiles.BY_GPU, kernel_profiles.FALLBACK)


def gpus(*sms: int) -> list[Gpu]:
    return [Gpu(name=f"GPU of sm{sm}", sm=sm, memory_bytes=1) for sm in sms]


@each_case(
    ("sms", "name"),
    [
        ((90, 90), "hopper"),
        ((100,), "blackwell"),
        ((100, 103), "blackwell"),
        ((120,), "blackwell-rtx"),
        ((121,), "blackwell-rtx"),
        ((80,), "fallback"),
        ((), "fallback"),
    ],
)
def test_choose_when_nothing_is_named_then_by_the_gpus(sms: tuple[int, ...], name: str) -> None:
    assert choose_profile(None, gpus(*sms)).name == name


def test_choose_when_a_name_is_given_then_it_beats_the_gpus() -> None:
    assert choose_profile("hopper", gpus(100)).name == "hopper"


@pytest.mark.parametrize("sms", [(90, 100), (90, 80)])
def test_choose_with_different_gpus_names_the_profiles(sms: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"different kernel profiles \(GPU of .*hopper"):
        choose_profile(None, gpus(*sms))


def test_choose_of_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="one of blackwell, blackwell-rtx, hopper, fallback"):
        choose_profile("hoper", [])


def test_choose_when_a_file_is_named_then_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("engine_args: {stream_interval: 4}\nenvironment: {A_B: 'x'}\n")
    assert choose_profile(str(path), gpus(90)) == KernelProfile(
        name="mine",
        sm=(),
        quantization={},
        engine_args={"stream_interval": 4},
        mxfp4_args={},
        environment={"A_B": "x"},
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("enviroment: {}", "unknown key 'enviroment'; did you mean 'environment'"),
        ("environment: {A: 1}", "environment.A is 1: expected a string"),
        ("sm: 90", "sm is 90: expected a list"),
        ("sm: ['90']", r"sm\.0 is '90': expected an integer$"),
        ("environment: {1: x}", r"environment\.1 is 1: expected a string\. Put it in quotes\."),
    ],
)
def test_choose_when_the_file_is_bad_then_refused_with_the_key(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        choose_profile(str(path), [])


def test_profile_is_read_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("sm: [90]")
    read = layers.read_yaml
    reads: list[Path] = []
    monkeypatch.setattr(layers, "read_yaml", lambda path: reads.append(path) or read(path))
    assert [choose_profile(str(path), []).sm for _ in range(3)] == [[90]] * 3
    assert len(reads) == 1
    path.write_text("sm: [100]")
    os.utime(path, ns=(0, 0))
    assert choose_profile(str(path), []).sm == [100]


def test_choose_finds_shipped_profiles_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert choose_profile(None, gpus(90)).name == "hopper"


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profile_fits_the_newest_release(name: str) -> None:
    profile = kernel_profiles.load_profile(name)
    assert schema.check(profile.engine_args, LIBRARY.newest, name) == []
    assert schema.check(profile.mxfp4_args, LIBRARY.newest, name) == []
    backend = profile.mxfp4_args.get("moe_config", {}).get("backend")
    assert backend == next(iter(profile.quantization), None)  # the first is the default


def test_profiles_have_one_file_per_gpu() -> None:
    folder = layers.find_file(kernel_profiles.FOLDER)
    assert {path.stem for path in folder.glob("*.yaml")} == set(SHIPPED)
    sms = [sm for name in SHIPPED for sm in kernel_profiles.load_profile(name).sm]
    assert len(sms) == len(set(sms))


def test_apply_keeps_an_exported_variable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UCX_MEMTYPE_CACHE", "y")
    monkeypatch.setenv("TRTLLM_ENABLE_PDL", "")  # so that it is restored
    monkeypatch.delenv("TRTLLM_ENABLE_PDL")
    environment = {"UCX_MEMTYPE_CACHE": "n", "TRTLLM_ENABLE_PDL": "1"}
    profile = KernelProfile(
        name="test", sm=(), quantization={}, engine_args={}, mxfp4_args={}, environment=environment
    )
    with caplog.at_level(logging.INFO):
        kernel_profiles.apply_profile(profile)
    assert os.environ["UCX_MEMTYPE_CACHE"] == "y"
    assert os.environ["TRTLLM_ENABLE_PDL"] == "1"
    assert (
        "UCX_MEMTYPE_CACHE='y' is set by the user, but kernels profile test needs 'n'; unset it"
        in caplog.text
    )
    assert "TRTLLM_ENABLE_PDL=1 (kernels profile test)" in caplog.text
