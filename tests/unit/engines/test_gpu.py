"""Which GPUs are seen, through a driver library that answers what the test says."""

import sys
import types
from collections.abc import Sequence

import pytest

from dynamo_trtllm.engines import gpu
from dynamo_trtllm.engines.gpu import (
    Gpu,
    GpuMemory,
    count_visible,
    free_and_total_bytes,
    list_gpus,
    visible_gpus,
)

H100 = ("NVIDIA H100 80GB HBM3", (9, 0), 80 << 30, "GPU-aaaa-1")
B200 = ("NVIDIA B200", (10, 0), 180 << 30, "GPU-bbbb-2")
RTX = ("NVIDIA RTX PRO 6000", (12, 0), 96 << 30, "GPU-aabb-3")


class NVMLError(Exception):
    pass


def driver(monkeypatch: pytest.MonkeyPatch, gpus: Sequence[tuple], *, fails: str = "") -> list[str]:
    """Puts a driver library in place; the list tells which calls were made."""
    calls: list[str] = []
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: gpus[handle][0],
        "nvmlDeviceGetCudaComputeCapability": lambda handle: gpus[handle][1],
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(
            total=gpus[handle][2], free=gpus[handle][2] // 4
        ),
        "nvmlDeviceGetUUID": lambda handle: gpus[handle][3],
    }
    module = types.ModuleType("pynvml")
    module.NVMLError = NVMLError

    def call(name: str):
        def answer(*arguments):
            calls.append(name)
            if name == fails:
                raise NVMLError(name)
            return answers[name](*arguments)

        return answer

    for name in answers:
        setattr(module, name, call(name))
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return calls


def test_visible_gpus_have_name_architecture_and_memory(monkeypatch):
    calls = driver(monkeypatch, [H100, B200])
    assert visible_gpus({}) == [
        Gpu(name="NVIDIA H100 80GB HBM3", sm=90, memory_bytes=80 << 30),
        Gpu(name="NVIDIA B200", sm=100, memory_bytes=180 << 30),
    ]
    assert calls[-1] == "nvmlShutdown"


@pytest.mark.parametrize(
    ("visible", "sms"),
    [
        ("0", [90]),
        ("2,0", [120, 90]),
        (" 1 , 2 ", [100, 120]),
        ("GPU-bbbb-2", [100]),
        ("GPU-bb", [100]),
        ("GPU-aa", []),  # two begin so
        ("0,-1,1", [90]),  # what follows an unknown one does not count
        ("0,7,1", [90]),
        ("MIG-aaaa", []),
        ("0,0", [90]),
        ("", []),
    ],
)
def test_visible_gpus_follow_the_variable_order(monkeypatch, visible, sms):
    driver(monkeypatch, [H100, B200, RTX])
    assert [gpu.sm for gpu in visible_gpus({"CUDA_VISIBLE_DEVICES": visible})] == sms


def test_visible_gpus_when_a_number_has_other_digits_then_none(monkeypatch):
    driver(monkeypatch, [H100, B200])
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "\u00b2"}) == []


def test_visible_gpus_default_to_the_process_environment(monkeypatch):
    driver(monkeypatch, [H100, B200])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.sm for gpu in visible_gpus()] == [100]


@pytest.mark.parametrize(
    "call", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName", "nvmlShutdown"]
)
def test_visible_gpus_when_driver_fails_then_none(monkeypatch, call):
    calls = driver(monkeypatch, [H100], fails=call)
    assert [gpu.sm for gpu in visible_gpus({})] == ([90] if call == "nvmlShutdown" else [])
    assert ("nvmlShutdown" in calls) == (call != "nvmlInit")


def test_visible_gpus_when_there_is_no_nvml_then_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert visible_gpus({}) == []


def test_memory_free_reports_each_visible_gpu(monkeypatch):
    driver(monkeypatch, [H100, B200, RTX])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert free_and_total_bytes() == [(24 << 30, 96 << 30), (20 << 30, 80 << 30)]


def test_count_visible_when_some_are_there_then_only_these_count(monkeypatch):
    driver(monkeypatch, [H100, B200])
    assert [
        count_visible({"CUDA_VISIBLE_DEVICES": named}) for named in ("0,1", "0,5", "5", "")
    ] == [2, 1, 0, 0]


def test_count_visible_is_unknown_for_a_mute_driver(monkeypatch, tmp_path):
    driver(monkeypatch, [H100], fails="nvmlInit")
    monkeypatch.setattr(gpu, "_DRIVERS", (tmp_path,))
    assert count_visible({"CUDA_VISIBLE_DEVICES": "0"}) is None
    monkeypatch.setattr(gpu, "_DRIVERS", ())
    assert count_visible({"CUDA_VISIBLE_DEVICES": "0"}) == 0


def put_nvidia_smi(monkeypatch, folder, script):
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_list_gpus_reads_nvidia_smi(monkeypatch, tmp_path):
    lines = "echo 'GPU-a1, 81559, 81000, NVIDIA H100'; echo 'GPU-b2, 143771, 500, NVIDIA H200, NVL'"
    put_nvidia_smi(monkeypatch, tmp_path, lines)
    assert list_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == (
        [
            GpuMemory(
                number=1, name="NVIDIA H200, NVL", total_bytes=143771 << 20, free_bytes=500 << 20
            )
        ],
        "",
    )
    assert [gpu.number for gpu in list_gpus({})[0]] == [0, 1]
    assert list_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ([], "CUDA_VISIBLE_DEVICES hides all")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo No devices were found", "nvidia-smi lists none"),
        ("exit 9", "nvidia-smi failed with status 9"),
        ("exec sleep 60", "nvidia-smi did not answer within 0.2 s"),
    ],
)
def test_list_gpus_when_there_is_none_then_the_reason(monkeypatch, tmp_path, script, why):
    put_nvidia_smi(monkeypatch, tmp_path, script)
    gpus, reason = list_gpus({}, timeout_s=0.2)
    assert gpus == []
    assert reason == why


def test_list_gpus_when_nvidia_smi_is_missing_then_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_gpus({}) == ([], "nvidia-smi is not installed")
