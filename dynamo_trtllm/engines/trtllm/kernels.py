"""Kernel profiles: what suits a GPU architecture, from `kernels_config/`, chosen once and put where it is read.

The choice is a function of its arguments and the files; only `apply` touches the process, and no vendor is imported.
"""

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
BY_GPU = ("blackwell", "blackwell-rtx", "hopper")  # the profiles that a GPU can choose
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
    sm: tuple[int, ...]  # the compute capabilities it is for, times ten
    quantization: Mapping[
        str, str
    ]  # MoE back end -> what it runs MXFP4 weights as; the first is meant, all are allowed
    engine_args: Mapping[str, Any]
    mxfp4_args: Mapping[str, Any]  # on top, for models whose weights are MXFP4
    environment: Mapping[str, str]

    @property
    def source(self) -> str:
        """How it is named beside what it sets."""
        return f"kernels profile {self.name}"


def choose(name: str | None, gpus: Sequence[Gpu]) -> KernelProfile:
    """The profile called `name` (or in the file `name`), else the one for `gpus`, else the fallback.

    Raises ConfigError for an unknown name, a bad file, and GPUs that need different profiles.
    """
    if name is not None:
        return load(name)
    known = [load(each) for each in BY_GPU]
    fitting = {gpu.sm: next((p for p in known if gpu.sm in p.sm), None) for gpu in gpus}
    names = {profile.name if profile else FALLBACK for profile in fitting.values()}
    if len(names) > 1:
        kinds = ", ".join(sorted({gpu.name for gpu in gpus}))
        raise ConfigError(
            f"the visible GPUs need different kernel profiles ({kinds}); hide some with CUDA_VISIBLE_DEVICES, "
            f"or name one with --kernels-profile: {', '.join(sorted(names))}",
            field="kernels_profile",
        )
    return next((profile for profile in fitting.values() if profile), None) or load(FALLBACK)


def load(name: str) -> KernelProfile:
    """Reads one profile: a name without a path, or a YAML file. Raises ConfigError."""
    is_name = re.fullmatch(r"[\w-]+", name) is not None
    path = FOLDER / f"{name}.yaml" if is_name else Path(name)
    found = layers.find_file(path)
    if is_name and not found.exists():
        known = ", ".join((*BY_GPU, FALLBACK))
        raise ConfigError(
            f"--kernels-profile {name}: there is no such profile; known: {known}", field="kernels_profile"
        )
    data = layers.read_yaml(found)
    layers.check_keys(data, _KINDS, str(path))
    for key, kind in _KINDS.items():
        if not isinstance(data.get(key, kind()), kind):
            raise ConfigError(f"{path}: {key} is {data[key]!r}: expected a {kind.__name__}", field=key)
    for key in ("quantization", "environment"):
        for entry, value in data.get(key, {}).items():
            if not isinstance(value, str):
                raise ConfigError(f"{path}: {key}.{entry} is {value!r}: quote it", field=key)
    return KernelProfile(
        name=path.stem,
        sm=tuple(data.get("sm", ())),
        quantization=data.get("quantization", {}),
        engine_args=data.get("engine_args", {}),
        mxfp4_args=data.get("mxfp4_args", {}),
        environment=data.get("environment", {}),
    )


def apply(profile: KernelProfile) -> None:
    """Exports the profile's variables, before the vendor is imported. What the user exported stays, with a warning."""
    for name, value in profile.environment.items():
        if environ.export(name, value, wanted_by=profile.source) == value:
            _log.info("%s=%s (%s)", name, value, profile.source)
