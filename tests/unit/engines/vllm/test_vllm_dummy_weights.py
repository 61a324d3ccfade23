"""Dummy weights have ordinary sizes, depend on their names alone, and change nothing that kernels
have packed.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dynamo_trtllm.engines.vllm.extension import fill_dummy


def filled(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a weight of sevens after it was filled with dummy values."""
    module = nn.Module()
    weight = nn.Parameter(torch.full(shape, 7, dtype=dtype), requires_grad=False)
    module.register_parameter(name, weight)
    fill_dummy(module)
    return weight


def test_fill_dummy_gpt_oss_weights_keep_product_sizes() -> None:
    assert (filled("input_layernorm_weight", 2880) == 1).all()
    assert not filled("attn_sinks", 64).any()
    assert not filled("w13_bias", 2, 5760).any()
    embedding = filled("embedding", 256, 400)
    router = filled("router", 128, 400)
    queries = filled("qkv_proj", 128, 400)
    deviations = [float(weights.std()) for weights in (embedding, router, queries)]
    assert deviations == pytest.approx([1.0, 1 / 20, 1.7 / 20], rel=0.02)


def test_fill_dummy_leaves_scales_and_unknown_forms() -> None:
    assert (filled("zeros", 128, 60, dtype=torch.uint8) == 7).all()
    assert (filled("qkv_proj_weight_scale", 512, 1) == 7).all()
    assert (filled("qkv_proj_weight_scale", 512) == 7).all()


def test_fill_dummy_mxfp4_experts_keep_product_sizes() -> None:
    assert set(filled("w13_weight", 8, 60, 40, dtype=torch.uint8).flatten().tolist()) == set(
        range(256)
    )
    (scale,) = set(filled("w13_weight_scale", 2, 3, 90, dtype=torch.uint8).flatten().tolist())
    assert 0.7 < 2.9 * 2.0 ** (scale - 127) * 2880**0.5 < 1.42


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(200, 64)
        self.norm = nn.LayerNorm(64)
        self.o_proj = nn.Linear(64, 64)
        self.w13_weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.uint8), requires_grad=False)
        self.packed = nn.Parameter(torch.full((4, 4), 7, dtype=torch.uint8), requires_grad=False)


def test_make_up_gives_equal_weights_in_two_processes() -> None:
    model = _Model()
    other = _Model()
    assert fill_dummy(model) == fill_dummy(other) == 6
    weights = model.state_dict()
    others = other.state_dict()
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name
    assert abs(float(weights["embed_tokens.weight"].std()) - 1) < 0.05
    assert abs(float(weights["o_proj.weight"].std()) * 8 - 1) < 0.05
    assert torch.equal(model.norm.weight, torch.ones(64))
    assert not model.o_proj.bias.any()
    assert model.w13_weight.unique().numel() == 256
    assert (model.packed == 7).all()
