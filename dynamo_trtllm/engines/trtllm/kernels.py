"""Load the kernel profiles of `kernels_config/`, choose one for the GPU architecture, and export its variables."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_trtllm.config import environ, layers
from dynamo_trtllm.engines.gpu import Gpu
from dynamo_trtllm.errors import ConfigError

_log = logging.getLogger(__name__)

FOLDER = Path("kernels_config")
BY_GPU = ("blackwell", "blackwell-rtx", "hopper")  # profiles with a list of architectures
FALLBACK = "fallback"
_KINDS: Mapping[str, type] = {
    "sm": list,
    "quantization": dict,
    "engine_args": dict,
    "mxfp4_args": dict,
    "environment": dict,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProfile:
    """One file of `kernels_config/`."""

    name: str
    sm: tuple[int, ...]  # compute capabilities times ten
    # MoE backend -> algorithm for MXFP4 weights; the first is the default, the others are allowed.
    quantization: Mapping[str, str]
    engine_args: Mapping[str, Any]
    mxfp4_args: Mapping[str, Any]  # additional arguments for models with MXFP4 weights
    environment: Mapping[str, str]

    @property
    def source(self) -> str:
        """Name of the profile as the source of an argument."""
        return f"kernels profile {self.name}"


def choose(name: str | None, gpus: Sequence[Gpu]) -> KernelProfile:
    """Return the named profile, else the one for the GPUs, else the fallback.

    Args:
        name: name of a profile, or path of a YAML file; None: choose by GPU.
        gpus: visible GPUs.

    Raises:
        ConfigError: the name is unknown, the file is invalid, or the GPUs need different profiles.
    """
    if name is not None:
        return load(name)
    known = [load(each) for each in BY_GPU]
    fitting = {gpu.sm: next((p for p in known if gpu.sm in p.sm), None) for gpu in gpus}
    names = {profile.name if profile else FALLBACK for profile in fitting.values()}
    if len(names) > 1:
        kinds = ", ".join(sorted({gpu.name for gpu in gpus}))
        raise ConfigError(
            f"The visible GPUs need different kernel profiles ({kinds}). Hide some with CUDA_VISIBLE_DEVICES, or "
            f"choose one with --kernels-profile: {', '.join(sorted(names))}.",
            field="kernels_profile",
        )
    return next((profile for profile in fitting.values() if profile), None) or load(FALLBACK)


def load(name: str) -> KernelProfile:
    """Read one profile.

    Args:
        name: name of a profile in `kernels_config/`, or path of a YAML file.

    Raises:
        ConfigError: there is no such profile, or the file is invalid.
    """
    is_name = re.fullmatch(r"[\w-]+", name) is not None
    path = FOLDER / f"{name}.yaml" if is_name else Path(name)
    found = layers.find_file(path)
    if is_name and not found.exists():
        known = ", ".join((*BY_GPU, FALLBACK))
        raise ConfigError(
            f"Unknown --kernels-profile {name}. Choose one of {known}, or pass a YAML file.", field="kernels_profile"
        )
    data = layers.read_yaml(found)
    layers.check_keys(data, _KINDS, str(path))
    values = {key: data.get(key, kind()) for key, kind in _KINDS.items()}
    for key, kind in _KINDS.items():
        if not isinstance(values[key], kind):
            raise ConfigError(f"{path}: {key} is {data[key]!r}: expected a {kind.__name__}", field=key)
    for key in ("quantization", "environment"):
        for entry, value in values[key].items():
            if not isinstance(value, str):
                raise ConfigError(
                    f"{path}: {key}.{entry} is {value!r}: expected a string. Put it in quotes.", field=key
                )
    return KernelProfile(name=path.stem, **{**values, "sm": tuple(values["sm"])})


def apply(profile: KernelProfile) -> None:
    """Export the profile's variables. Call it before TensorRT-LLM is imported.

    Variables that the user has set are not changed; a warning is logged.
    """
    for name, value in profile.environment.items():
        if environ.export(name, value, wanted_by=profile.source) == value:
            _log.info("%s=%s (%s)", name, value, profile.source)
