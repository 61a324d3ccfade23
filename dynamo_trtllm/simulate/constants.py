"""Constants of models on GPUs: arguments with which the mock engine takes the same time.

`constants.yaml` has the constants of the package, each with its source. For other models and GPUs,
there are no constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from dynamo_trtllm.config.layers import read_yaml
from dynamo_trtllm.protocol.errors import ConfigError

_PACKAGED: Final = Path(__file__).parent / "constants.yaml"


class Errors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The errors of simulations on measured loads to which the constants were not fitted.

    Each number is the median of the absolute errors of p50, as a fraction: 0.1 means 10 %.
    """

    ttft: float
    mean_gap: float
    worst_gap: float | None = None  # None: not measured


class Constants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The times of one model and engine on one kind of GPU.

    They were fitted to measured loads, or learned by a worker.
    """

    models: tuple[str, ...]  # names in lower case, without the organization
    engine: str
    versions: tuple[str, ...]  # releases of the engine that were measured
    gpu: str  # the GPU model, in lower case
    source: str  # what was measured, and by whom
    fitted: str  # the measured loads to which the constants were fitted
    mock: dict[str, Any]  # engine arguments of the mock engine
    gpus_per_worker: int = 1
    frontend_ms: float = 0.0  # time that a request takes outside of engines
    errors: Errors | None = None  # None: the simulation was not compared with measurements

    def is_of(
        self,
        model: str,
        engine: str,
        gpu: str,
        version: str | None,
        gpus_per_worker: int | None = None,
    ) -> bool:
        """Return whether the constants are those of a model and engine on a GPU.

        Args:
            model: name or folder of the model.
            engine: name of the engine.
            gpu: the GPU model.
            version: release of the engine. None: any.
            gpus_per_worker: GPUs of a worker. None: any number.
        """
        name = model.rstrip("/").rpartition("/")[2].lower()
        is_release = version is None or version in self.versions
        is_engine = engine == self.engine and is_release
        is_size = gpus_per_worker in (None, self.gpus_per_worker)
        is_gpu = gpu.lower() == self.gpu
        return name in self.models and is_engine and is_size and is_gpu


def known_constants(more: Path | None = None) -> list[Constants]:
    """Return all constants. Those of the file `more` come first.

    Raises:
        ConfigError: a file is not valid.
    """
    files = [_PACKAGED] if more is None else [more, _PACKAGED]
    return [constants for file in files for constants in _read(file)]


def find_constants(
    known: Sequence[Constants],
    model: str,
    engine: str,
    gpu: str | None,
    version: str | None = None,
    gpus_per_worker: int | None = None,
) -> Constants:
    """Return the constants of a model and engine on a GPU, the first ones that are known.

    Args as for `Constants.is_of`.

    Raises:
        ConfigError: there are none; the message says which there are, and how to get some.
    """
    if gpu is None:
        raise ConfigError(
            f"the time that {model} takes depends on the GPU; pass --gpu, such as --gpu h200"
        )
    for constants in known:
        if constants.is_of(model, engine, gpu, version, gpus_per_worker):
            return constants
    names = ", ".join(
        f"{one.models[0]} with {one.engine} {one.versions[0]} on {one.gpus_per_worker} {one.gpu}"
        for one in known
    )
    release = "" if version is None else f" {version}"
    size = "" if gpus_per_worker is None else f"{gpus_per_worker} "
    raise ConfigError(
        f"no constants for {model} with {engine}{release} on {size}{gpu}; known are {names}. Run"
        " `dynamo-trtllm profile` on a worker of this model, and pass its file with --constants"
    )


def _read(path: Path) -> list[Constants]:
    content = read_yaml(path)
    try:
        return msgspec.convert(content.get("constants"), list[Constants])
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{path} has no constants: {exc}; see docs/simulate.md") from exc
