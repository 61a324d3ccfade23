"""Parser flags: what a model's format brings is meant without a flag, what it does not have is
refused by name.
Sampling defaults: read from the model's generation config, unless a flag says otherwise.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.cluster.discovery.records import EndpointId
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.engine_interface import EngineInfo
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Limits, SamplingDefaults
from dynamo_trtllm.worker.card import (
    check_card_flags,
    digest,
    parser_names,
    sampling_defaults,
    with_custom_template,
    without_unsupported,
)
from dynamo_trtllm.worker.description import describe
from tests.kit.cases import each_case
from tests.kit.instances import LAYOUT


@each_case(
    ("renderer", "flags", "expected"),
    [
        ("harmony", {}, ("gpt_oss", "harmony")),
        (
            "harmony",
            {"dyn_reasoning_parser": "gpt_oss", "dyn_tool_call_parser": "harmony"},
            ("gpt_oss", "harmony"),
        ),
        ("harmony", {"dyn_reasoning_parser": "none"}, ("none", "harmony")),
        ("harmony", {"dyn_tool_call_parser": "none"}, ("gpt_oss", "none")),
        ("chat_template", {}, ("none", "none")),
        ("chat_template", {"dyn_reasoning_parser": "basic"}, ("basic", "none")),
        (
            "chat_template",
            {"dyn_reasoning_parser": "deepseek_r1", "dyn_tool_call_parser": "json"},
            ("deepseek_r1", "json"),
        ),
        ("chat_template", {"dyn_tool_call_parser": "hermes"}, ("none", "hermes")),
    ],
)
def test_parsers_of_the_format_go_on_the_card(
    renderer: str, flags: dict[str, Any], expected: tuple[str, str]
) -> None:
    found = parser_names(WorkerConfig(model_path="m", **flags), renderer)
    assert (found["reasoning_parser"], found["tool_call_parser"]) == expected


@each_case(
    ("renderer", "flag", "value"),
    [
        ("chat_template", "reasoning", "gpt_oss"),
        ("chat_template", "tool-call", "harmony"),
        ("harmony", "reasoning", "basic"),
        ("harmony", "reasoning", "deepseek_r1"),
        ("harmony", "tool-call", "hermes"),
        ("harmony", "tool-call", "json"),
    ],
)
def test_parsers_of_another_format_are_rejected_by_flag(
    renderer: str, flag: str, value: str
) -> None:
    field = f"dyn_{flag.replace('-', '_')}_parser"
    with pytest.raises(
        ConfigError, match=f"--dyn-{flag}-parser {value} does not fit .* or leave the flag out"
    ) as caught:
        parser_names(WorkerConfig(model_path="m", **{field: value}), renderer)
    assert caught.value.field == field


@pytest.mark.parametrize(("model_type", "parser"), [("gpt_oss", "basic"), ("llama", "gpt_oss")])
def test_check_flags_rejects_a_known_wrong_format(
    tmp_path: Path, model_type: str, parser: Any
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError, match=f"--dyn-reasoning-parser {parser}"):
        check_card_flags(
            WorkerConfig(model_path=str(tmp_path), dyn_reasoning_parser=parser), reads_model=True
        )


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"model_type": "llama"}'])
def test_check_flags_accepts_an_unknown_format(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    check_card_flags(
        WorkerConfig(model_path=str(tmp_path), dyn_reasoning_parser="basic"), reads_model=True
    )


def test_template_replaces_that_of_the_model(tmp_path: Path) -> None:
    template = tmp_path / "other.jinja"
    template.write_text("{{ messages }}")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    config = WorkerConfig(model_path=str(tmp_path), custom_jinja_template=template)
    check_card_flags(config, reads_model=True)
    own = {
        "tokenizer.json": tmp_path / "tokenizer.json",
        "chat_template.jinja": tmp_path / "chat_template.jinja",
    }
    assert with_custom_template(config, "chat_template", own) == own | {
        "chat_template.jinja": template
    }
    assert with_custom_template(WorkerConfig(model_path="m"), "chat_template", own) == own


def test_template_hash_is_on_the_card(tmp_path: Path) -> None:
    template = tmp_path / "other.jinja"
    template.write_text("{{ messages }}")
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    info = EngineInfo(
        engine="torch",
        context_length=8,
        vocab_size=8,
        eos_token_ids=(1,),
        renderer="chat_template",
        files={"tokenizer.json": tokenizer},
        layout=LAYOUT,
        limits=Limits(),
    )
    config = WorkerConfig(model_path="m", engine="torch", custom_jinja_template=template)
    endpoint = EndpointId("dynamo", "backend", "generate")
    instance, files = describe(config, endpoint, 1, info, SamplingDefaults())
    assert instance.card.files == {
        "tokenizer.json": digest(tokenizer),
        "chat_template.jinja": digest(template),
    }
    assert files == {digest(tokenizer): tokenizer, digest(template): template}


@pytest.mark.parametrize(
    ("model_type", "content", "problem"),
    [
        ("gpt_oss", b"x", "has no effect on this model, which uses the Harmony format"),
        ("llama", None, "can't be read: No such file or directory"),
        ("llama", b"\xff", "can't be read: it is not UTF-8"),
    ],
)
def test_template_without_effect_is_rejected(
    tmp_path: Path, model_type: str, content: bytes | None, problem: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    template = tmp_path / "t.jinja"
    if content is not None:
        template.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--custom-jinja-template .*{problem}"):
        check_card_flags(
            WorkerConfig(model_path=str(tmp_path), custom_jinja_template=template), reads_model=True
        )


@pytest.mark.parametrize(
    ("generation", "flags", "expected"),
    [
        (
            {
                "temperature": 0.6,
                "top_p": 0.9,
                "top_k": 20,
                "min_p": None,
                "repetition_penalty": 1.05,
                "eos_token_id": 2,
            },
            {},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05},
        ),
        ({"do_sample": True, "bos_token_id": 1}, {}, {}),
        (None, {}, {}),
        ({"temperature": 0.6}, {"generation_config": "none"}, {}),
        ({"temperature": "hot"}, {"generation_config": "none"}, {}),
    ],
    ids=str,
)
def test_sampling_defaults_come_from_generation_config(
    tmp_path: Path, generation: Any, flags: Any, expected: dict[str, float]
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    found = sampling_defaults(WorkerConfig(model_path=str(tmp_path), **flags), str(tmp_path))
    assert found.given() == expected


def test_sampling_defaults_of_smollm2_are_bundled(tmp_path: Path) -> None:
    found = sampling_defaults(WorkerConfig(model_path=str(tmp_path)), "smollm2")
    assert found.given() == {"temperature": 0.2, "top_p": 0.9}


@pytest.mark.parametrize("value", ["hot", -1, 2.5, [1], True])
def test_sampling_defaults_error_names_file_field_and_flag(tmp_path: Path, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": value}))
    with pytest.raises(
        ConfigError, match=r"generation_config\.json: .*temperature.*--generation-config none"
    ):
        sampling_defaults(WorkerConfig(model_path=str(tmp_path)), str(tmp_path))


def test_without_rejected_drops_a_default_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    defaults = SamplingDefaults(temperature=0.6, min_p=0.1)
    assert without_unsupported(defaults, ("min_p", "seed")).given() == {"temperature": 0.6}
    assert "generation config: min_p ignored" in caplog.text
    caplog.clear()
    neutral = SamplingDefaults(repetition_penalty=1.0)  # the same answers without it
    assert (without_unsupported(neutral, ("repetition_penalty",)), caplog.text) == (
        SamplingDefaults(),
        "",
    )


def test_sampling_defaults_accept_top_k_as_float(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_k": 50.0}')
    assert sampling_defaults(
        WorkerConfig(model_path=str(tmp_path)), str(tmp_path)
    ) == SamplingDefaults(top_k=50)
