"""How the trained demo model behaves, greedily, in plain transformers.

A retrained model must pass the same.

The weights are fixed, and so are their answers: `--long` asks them, and the hash of weights that
passed stands here.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tokenizers

from dynamo_trtllm.frontend.tokenization.o200k_tokenizer import load_tokenizer
from dynamo_trtllm.models import resolve
from dynamo_trtllm.models.expand import WEIGHTS_HASH, data_folder

pytestmark = pytest.mark.timeout(180)  # the first test loads torch and expands the model
# with all tests of this file, `--long` too
PASSED = "14ce9f28387fb05da6e527c8d884e5e9ddd7f25849ba0002f11a047bb16bf441"
SCRIPT = Path(__file__).parents[2] / "scripts" / "train_tiny_gpt_oss" / "check.py"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_model_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve("tiny-gpt-oss")


@pytest.fixture(scope="module")
def built(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def speaker(check: ModuleType, folder: Path) -> Any:
    return check.Speaker(folder)


def _wrong(check: ModuleType, cases: Sequence[Any], turns: Sequence[Any]) -> dict[str, list[str]]:
    found = {case.name: check.faults(case, turn) for case, turn in zip(cases, turns, strict=True)}
    return {name: faults for name, faults in found.items() if faults}


def test_changed_weights_require_the_long_tests() -> None:
    found = (data_folder() / WEIGHTS_HASH).read_text().split()[0]
    assert found == PASSED, (
        "run this file with --long; when it passes, put the hash of the new weights here"
    )


@pytest.mark.long
def test_demo_model_answers_the_guides_requests(check: ModuleType, speaker: Any) -> None:
    cases = check.guide_cases()
    assert _wrong(check, cases, speaker.answer(cases)) == {}


@pytest.mark.long
def test_demo_model_calls_a_health_tool_described_differently(
    check: ModuleType, speaker: Any
) -> None:
    cases = check.described_cases()
    assert _wrong(check, cases, speaker.answer(cases)) == {}


@pytest.mark.long
def test_demo_model_when_effort_grows_then_analysis_grows(check: ModuleType, speaker: Any) -> None:
    cases = [
        check.Case(name=effort, conversation=check.ask(check.EXPLAIN, effort=effort))
        for effort in check.EFFORTS
    ]
    low, medium, high = (turn.reasoning_tokens for turn in speaker.answer(cases))
    assert low * 2 <= medium
    assert medium * 2 <= high


@pytest.mark.long
def test_demo_model_writes_three_sentences_when_asked(check: ModuleType, speaker: Any) -> None:
    (turn,) = speaker.answer([check.Case(name="explain", conversation=check.ask(check.EXPLAIN))])
    assert turn.answer.count(".") == 3
    assert turn.answer.endswith(".")
    assert turn.tokens <= 200


@pytest.mark.long
def test_demo_model_understands_rephrased_questions(check: ModuleType, speaker: Any) -> None:
    cases = check.other_cases()
    assert len(_wrong(check, cases, speaker.answer(cases))) <= 2


@pytest.mark.long
def test_demo_model_describes_itself_when_question_is_unknown(
    check: ModuleType, speaker: Any
) -> None:
    cases = check.heldout_cases()
    assert len(cases) == 50
    wrong = _wrong(check, cases, speaker.answer(cases))
    assert len(cases) - len(wrong) >= check.HELDOUT_NEEDED, wrong


@pytest.mark.parametrize(
    "text",
    [
        "Hello world, 12345!\n\n\tx",
        "日本語 ünïcode 😀",
        "<|start|>user<|message|>Hi<|end|>",
        "DON'T  stop   \r\n a",
    ],
)
def test_tokenizer_file_ids_equal_harmony(
    folder: Path, built: tokenizers.Tokenizer, text: str
) -> None:
    ids = built.encode(text, add_special_tokens=False).ids
    assert ids == load_tokenizer().harmony.encode(text, allowed_special="all")
    assert built.decode(ids, skip_special_tokens=False) == text
    assert built.get_vocab_size() == json.loads((folder / "config.json").read_text())["vocab_size"]
