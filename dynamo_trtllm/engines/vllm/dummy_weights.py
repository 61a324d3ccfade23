"""Dummy weights with which answers depend on the prompt, for `load_format: dummy`. Runs in vLLM's worker processes.

vLLM's own are within a thousandth of zero, norms too, and packed ones are uninitialized memory (0.24.0,
`initialize_dummy_weights`): answers then depend on a prompt's last token at most, so that KV which never arrived goes
unnoticed, and a router sends every token to the same few experts, which makes them cheap. These keep activations of
ordinary size. They depend on a weight's name alone and are equal in every worker. Knows no requests.
"""

from __future__ import annotations

import importlib
import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

_SHARPER = 1.7  # queries and keys: a prompt's tokens are attended to unequally, so that each one counts
# MXFP4: two numbers of four bits in a byte, whose deviation is 2.9 when all are as likely, and for 32 of them a scale,
# the exponent of two plus 127 (OCP Microscaling Formats 1.0).
_FP4_DEVIATION = 2.9
_EXPONENT_BIAS = 127


class Normal(NamedTuple):
    """Floating-point numbers."""

    mean: float
    deviation: float


class Bytes(NamedTuple):
    """Packed ones."""

    lowest: int
    highest: int


def drawn_from(name: str, shape: Sequence[int], *, is_packed: bool = False) -> Normal | Bytes | None:
    """What a weight of this name and shape is made of, before kernels rearrange it; None: it stays as it is."""
    if is_packed:
        return _packed(name, shape)
    if "scale" in name:
        return None
    if "bias" in name or len(shape) == 1:
        return Normal(1.0 if "norm" in name and "bias" not in name else 0.0, 0.0)
    if len(shape) < 2:
        return None
    if "embed" in name:
        return Normal(0.0, 1.0)
    return Normal(0.0, (_SHARPER if "qkv" in name else 1.0) / math.sqrt(shape[-1]))


def _packed(name: str, shape: Sequence[int]) -> Bytes | None:
    if not name.endswith(("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")):
        return None
    if not name.endswith("scale"):
        return Bytes(0, 255)
    wanted = 1 / math.sqrt(32 * shape[-1])
    exponent = _EXPONENT_BIAS + round(math.log2(wanted / _FP4_DEVIATION))
    return Bytes(exponent, exponent)


def fill_dummy(model: Any) -> int:
    """Overwrites the weights of a torch module in place; how many."""
    import torch

    count = 0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_packed = weight.dtype == torch.uint8
            if not is_packed and not weight.is_floating_point():
                continue
            numbers = torch.Generator(device=weight.device).manual_seed(zlib.crc32(name.encode()))
            match drawn_from(name, weight.shape, is_packed=is_packed):
                case None:
                    continue
                case Normal(mean, 0.0):
                    weight.fill_(mean)
                case Normal(mean, deviation):
                    weight.normal_(mean, deviation, generator=numbers)
                case Bytes(lowest, highest):
                    weight.random_(lowest, highest + 1, generator=numbers)
            count += 1
    return count


def install() -> None:
    """From here on vLLM's load format `dummy` in this process makes these up."""
    loaders = importlib.import_module("vllm.model_executor.model_loader")
    dummy: Any = loaders.DummyModelLoader

    class MadeUpLoader(dummy):  # type: ignore[misc]  # of a vendor that is not typed here
        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            fill_dummy(model)

    loaders.register_model_loader("dummy")(MadeUpLoader)
