"""Made-up weights: of ordinary size, by name alone, and nothing that kernels have packed is touched."""

from __future__ import annotations

import torch
from torch import nn

from dynamo_trtllm.engines.vllm.extension import Bytes, Normal, drawn_from, fill_dummy


def test_drawn_from_when_weights_are_gpt_oss_then_norms_pass_and_products_keep_their_size() -> None:
    assert drawn_from("model.layers.0.input_layernorm.weight", (2880,)) == Normal(1.0, 0.0)
    assert drawn_from("model.layers.0.attn.sinks", (64,)) == Normal(0.0, 0.0)
    assert drawn_from("model.layers.0.mlp.experts.w13_bias", (128, 5760)) == Normal(0.0, 0.0)
    assert drawn_from("model.embedding.weight", (201_088, 2880)) == Normal(0.0, 1.0)
    assert drawn_from("model.layers.0.mlp.router.weight", (128, 400)) == Normal(0.0, 1 / 20)
    queries, others = (drawn_from(f"model.layers.0.attn.{name}.weight", (512, 400)) for name in ("qkv_proj", "o_proj"))
    assert isinstance(queries, Normal)
    assert isinstance(others, Normal)
    assert queries.deviation > others.deviation


def test_drawn_from_when_weights_are_scales_or_of_an_unknown_form_then_they_stay() -> None:
    assert drawn_from("model.layers.0.mlp.zeros", (128, 5760), is_packed=True) is None
    assert drawn_from("model.layers.0.attn.qkv_proj.weight_scale", (512, 1)) is None
    assert drawn_from("model.layers.0.attn.qkv_proj.weight_scale", (512,)) is None


def test_drawn_from_when_experts_are_mxfp4_then_numbers_times_scales_keep_the_size_of_products() -> None:
    experts = "model.layers.0.mlp.experts"
    assert drawn_from(f"{experts}.w13_weight", (128, 5760, 1440), is_packed=True) == Bytes(0, 255)
    scale = drawn_from(f"{experts}.w13_weight_scale", (128, 5760, 90), is_packed=True)
    assert isinstance(scale, Bytes)
    assert scale.lowest == scale.highest
    assert 0.7 < 2.9 * 2.0 ** (scale.lowest - 127) * 2880**0.5 < 1.42


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(200, 64)
        self.norm = nn.LayerNorm(64)
        self.o_proj = nn.Linear(64, 64)
        self.w13_weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.uint8), requires_grad=False)
        self.packed = nn.Parameter(torch.full((4, 4), 7, dtype=torch.uint8), requires_grad=False)


def test_make_up_when_called_in_two_processes_then_weights_are_equal_and_of_ordinary_size() -> None:
    model, other = _Model(), _Model()
    assert fill_dummy(model) == fill_dummy(other) == 6
    weights, others = model.state_dict(), other.state_dict()
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name
    assert abs(float(weights["embed_tokens.weight"].std()) - 1) < 0.05
    assert abs(float(weights["o_proj.weight"].std()) * 8 - 1) < 0.05
    assert torch.equal(model.norm.weight, torch.ones(64))
    assert not model.o_proj.bias.any()
    assert model.w13_weight.unique().numel() == 256
    assert (model.packed == 7).all()
