"""The GPUs that preflight knows by name, for judging a configuration on a machine without one. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dynamo_trtllm.errors import ConfigError

PCIE5_BYTES_S = 64e9  # sixteen lanes, one way
PCIE4_BYTES_S = 32e9
NETWORK_BYTES_S = 50e9  # one 400 Gb/s adapter per GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownGpu:
    """One GPU as its maker describes it; memory is about what the driver shows."""

    name: str
    sm: int
    memory_bytes: int
    nvlink_bytes_s: float | None  # one way, all links together; None: it has none
    pcie_bytes_s: float = PCIE5_BYTES_S


def _gpu(name: str, sm: int, memory_mib: int, nvlink_gb_s: int | None, pcie: float = PCIE5_BYTES_S) -> KnownGpu:
    nvlink = None if nvlink_gb_s is None else nvlink_gb_s * 1e9
    return KnownGpu(name=name, sm=sm, memory_bytes=memory_mib << 20, nvlink_bytes_s=nvlink, pcie_bytes_s=pcie)


GPUS: Mapping[str, KnownGpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100", 80, 81_920, 300, PCIE4_BYTES_S),
        _gpu("l40s", 89, 46_068, None, PCIE4_BYTES_S),
        _gpu("h100", 90, 81_559, 450),
        _gpu("h20", 90, 97_871, 450),
        _gpu("h200", 90, 143_771, 450),
        _gpu("gh200", 90, 97_871, 450),
        _gpu("b200", 100, 183_359, 900),
        _gpu("gb200", 100, 189_471, 900),
        _gpu("b300", 103, 275_040, 900),
        _gpu("gb300", 103, 284_208, 900),
        _gpu("rtx-pro-6000", 120, 97_887, None),
        _gpu("rtx-5090", 120, 32_607, None),
    )
}


def known_gpu(name: str) -> KnownGpu:
    """Raises ConfigError for a name that is not in the table."""
    if name not in GPUS:
        raise ConfigError(f"--gpu {name} is not known; known: {', '.join(sorted(GPUS))}", field="gpu")
    return GPUS[name]


def links_of(gpu_name: str) -> dict[str, float]:
    """Bytes per second, one way, of the ways KV can take from GPUs of this kind. `gpu_name`: ours or the driver's."""
    gpu = _alike(gpu_name)
    links = {"PCIe": PCIE5_BYTES_S if gpu is None else gpu.pcie_bytes_s, "network (400 Gb/s)": NETWORK_BYTES_S}
    if gpu is None or gpu.nvlink_bytes_s is None:
        return links
    return {"NVLink": gpu.nvlink_bytes_s, **links}


def _alike(name: str) -> KnownGpu | None:
    """The known GPU that a driver's name ("NVIDIA H200") means; the longest match, because H20 is in H200."""
    plain = name.lower().replace(" ", "-")
    found = [known for known in GPUS if known in plain]
    return GPUS[max(found, key=len)] if found else None
