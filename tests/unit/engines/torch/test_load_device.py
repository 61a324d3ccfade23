"""On which device a model is loaded."""

import pytest
import torch

from dynamo_trtllm.engines.torch.args import TorchArgs
from dynamo_trtllm.protocol.errors import ConfigError


@pytest.mark.parametrize("requested", ["0", "0, 1", "GPU-8f2e"])
def test_load_for_unusable_gpus_does_not_use_the_cpu(monkeypatch, requested):
    from dynamo_trtllm.engines.torch.load import load  # takes seconds: it imports transformers

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", requested)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=rf"requests GPUs {requested}, but .* can use none"):
        load("no/folder", TorchArgs())
    with pytest.raises(ConfigError, match="no/folder does not exist"):
        load("no/folder", TorchArgs(device="cpu"))
