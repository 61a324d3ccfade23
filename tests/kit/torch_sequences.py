"""Sequences of the torch engine without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dynamo_trtllm.engines.torch.sequence import TorchSequence
from dynamo_trtllm.protocol.messages import GenerateRequest


def sequence_of(request: GenerateRequest, **fields: Any) -> TorchSequence:
    """Return the sequence of a request. `fields`: its attributes."""
    kv_holder: Any = SimpleNamespace()
    seq = TorchSequence(
        request, lambda _: None, tasks=set(), kv_holder=kv_holder, retire=lambda _: None
    )
    for name, value in fields.items():
        setattr(seq, name, value)
    return seq
