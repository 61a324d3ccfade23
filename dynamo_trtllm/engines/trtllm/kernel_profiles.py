"""Choose and apply the kernel profile of a GPU architecture, a file of `kernels_config/`.

A profile has arguments for `LLM`, which all other sources override, and environment variables.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, StrictInt, ValidationError

from dynamo_trtllm.config import environ, layers
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.gpu import Gpu, visible_gpus
from dynamo_trtllm.engines.warm_up import cache_folders
from dynamo_trtllm.protocol.errors import ConfigError

log = logging.getLogger(__name__)

FOLDER = Path("kernels_config")
BY_GPU = ("blackwell", "blackwell-rtx", "hopper")  # profiles with a list of architectures
FALLBACK = "fallback"


class KernelProfile(BaseModel, frozen=True):
    """One file of `kernels_config/`."""

    name: str
    sm: list[StrictInt] = []  # compute capabilities times ten
    # MoE backend -> algorithm for MXFP4 weights; the first is the default, the others are allowed.
    quantization: dict[str, str] = {}
    engine_args: dict[str, Any] = {}
    mxfp4_args: dict[str, Any] = {}  # additional arguments for models with MXFP4 weights
    environment: dict[str, str] = {}

    @property
    def source(self) -> str:
        """Name of the profile as the source of an argument."""
        return f"kernels profile {self.name}"


def choose_profile(name: str | None, gpus: Sequence[Gpu]) -> KernelProfile:
    """Return the named profile; without a name, the profile for the GPUs; without one, the
    fallback.

    Args:
        name: name of a profile, or path of a YAML file; None to choose by GPU.
        gpus: visible GPUs.

    Raises:
        ConfigError: the name is unknown, the file is invalid, or the GPUs need different profiles.
    """
    if name is not None:
        return load_profile(name)
    # The profiles that the GPUs need, by name.
    needed: dict[str, KernelProfile] = {}
    known = [load_profile(name) for name in BY_GPU]
    for gpu in gpus:
        fitting = [profile for profile in known if gpu.sm in profile.sm]
        profile = fitting[0] if fitting else load_profile(FALLBACK)
        needed[profile.name] = profile
    if len(needed) > 1:
        kinds = ", ".join(sorted({gpu.name for gpu in gpus}))
        raise ConfigError(
            f"The visible GPUs need different kernel profiles ({kinds}). Hide some with"
            " CUDA_VISIBLE_DEVICES, or choose one with --kernels-profile:"
            f" {', '.join(sorted(needed))}.",
            field="kernels_profile",
        )
    return next(iter(needed.values()), None) or load_profile(FALLBACK)


def load_profile(name: str) -> KernelProfile:
    """Return one profile. Its file is read once, and again after a change.

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
            f"Unknown --kernels-profile {name}. Choose one of {known}, or pass a YAML file.",
            field="kernels_profile",
        )
    written_ns = found.stat().st_mtime_ns if found.exists() else 0
    return _read_profile(path, found.absolute(), written_ns)


@lru_cache(maxsize=16)
def _read_profile(path: Path, found: Path, written_ns: int) -> KernelProfile:
    """Read one file.

    The result is cached, because reading a file takes 8 ms, and a preflight of many files needs the
    same profiles often.

    Args:
        path: name of the file in errors.
        found: the file.
        written_ns: time of the last change of the file. A changed file is read again.
    """
    data = layers.read_yaml(found)
    layers.check_keys(data, KernelProfile.model_fields.keys() - {"name"}, str(path))
    try:
        return KernelProfile(name=path.stem, **data)
    except ValidationError as exc:
        first = exc.errors()[0]
        expected = (
            first["msg"]
            .replace("Input should be a valid", "expected a")
            .replace("a integer", "an integer")
        )
        fix = ". Put it in quotes." if first["type"] == "string_type" else ""
        # pydantic adds "[key]" if the key itself is wrong.
        key = ".".join(str(part) for part in first["loc"] if part != "[key]")
        raise ConfigError(
            f"{path}: {key} is {first['input']!r}: {expected}{fix}", field=str(first["loc"][0])
        ) from exc


def apply_profile(profile: KernelProfile) -> None:
    """Export the profile's variables. Call it before TensorRT-LLM is imported.

    Variables that the user has set are not changed; a warning is logged.
    """
    for name, value in profile.environment.items():
        if environ.export(name, value, wanted_by=profile.source) == value:
            log.info("%s=%s (%s)", name, value, profile.source)


def rank_environment(config: WorkerConfig) -> tuple[KernelProfile, dict[str, str]]:
    """Return the kernel profile of this host, and the variables that each rank reads: those of the
    profile, and those of the folders of compiled kernels.

    The ranks of an engine on several nodes read the variables when they start. This package runs
    only later, on rank 0, where it is too late to set them. TensorRT-LLM need not be installed.

    Raises:
        ConfigError: as `choose_profile` does.
    """
    profile = choose_profile(config.kernels_profile, visible_gpus())
    caches = {} if config.compile_cache is None else cache_folders(config.compile_cache.absolute())
    return profile, {**profile.environment, **caches}
