"""How the weights of the output layer are stored on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dynamo_trtllm.engines.torch.args import TorchArgs
from tests.kit.tiny_models import save_tiny_llama


def loaded(folder: Path, **sizes: int) -> Any:
    from dynamo_trtllm.engines.torch.load import load  # importing transformers takes seconds

    return load(str(save_tiny_llama(folder, **sizes)), TorchArgs(device="cpu")).module


def test_own_weights_are_stored_by_columns(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    module = loaded(tmp_path / "model")
    weight = module.get_output_embeddings().weight
    assert weight.t().is_contiguous()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert torch.equal(weight, saved.get_output_embeddings().weight)


def test_weights_of_the_input_layer_keep_their_order(tmp_path: Path) -> None:
    module = loaded(tmp_path / "model", tie_word_embeddings=True)
    weight = module.get_output_embeddings().weight
    assert weight is module.get_input_embeddings().weight
    assert weight.is_contiguous()
