"""The arguments of a call in `/v1/messages` are the beginning of an object at any time."""

from __future__ import annotations

import json
import random
from typing import Any

import pydantic_core
import pytest

from dynamo_trtllm.frontend.messages_api.json_object import ObjectScanner
from tests.kit.frontend_app import CALL, chunk, front, stop
from tests.kit.messages_client import TOOL, events

VALID = '{"a": [1, -2.5e+3, true, null, {}, []], "\\"b": "x\\u00e9\\ud83e\\uddd1\\n"} \n'
# An object, and what of it is valid.
BROKEN = {
    '{"a": "one\ntwo"}': '{"a": "one',
    "{'a': 1}": "{",
    '{"a": 1 "b": 2}': '{"a": 1 ',
    '{"a": 1,}': '{"a": 1,',
    '{"a": [1}': '{"a": [1',
    '{"a": nil}': '{"a": n',
    '{"a": 01}': '{"a": 0',
    '{"a": NaN}': '{"a": ',
    '{"a": "\\x"}': '{"a": "\\',
    '{"a": "\\ud83e!"}': '{"a": "\\ud83e',
    '{"a": 1} and more': '{"a": 1}',
    '{"a": 1}{"a": 2}': '{"a": 1}',
}


def scanned(text: str, step: int) -> tuple[str, bool]:
    """Return the valid part of a text that arrives in steps, and whether it is complete."""
    scanner = ObjectScanner()
    parts = [scanner.valid_part(text[at : at + step]) for at in range(0, len(text), step)]
    return "".join(parts), scanner.is_complete


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_object_is_valid_up_to_its_end(step: int) -> None:
    assert scanned(VALID, step) == (VALID.rstrip(), True)


@pytest.mark.parametrize(("text", "valid"), BROKEN.items())
def test_broken_object_is_valid_up_to_the_error(text: str, valid: str) -> None:
    assert scanned(text, 1) == (valid, valid.endswith("}"))


def test_valid_part_of_any_text_is_read_by_the_parser_of_sdks() -> None:
    chance = random.Random(0)
    inserted = [*'{}[]",:x1e.-\\u\n ', "true", "\\ud800", "NaN", ""]
    for _ in range(3000):
        at = chance.randrange(len(VALID))
        text = VALID[:at] + chance.choice(inserted) + VALID[at + chance.randrange(2) :]
        valid, is_complete = scanned(text, chance.randint(1, 9))
        assert text.startswith(valid)
        if valid.strip():
            # The SDK parses what has arrived after each event, and raises ValueError.
            pydantic_core.from_json(valid, allow_partial=True, allow_inf_nan=False)
        if is_complete:
            assert isinstance(json.loads(valid), dict)


@pytest.mark.parametrize("text", BROKEN)
async def test_stream_of_broken_arguments_can_be_parsed_at_any_time(text: str) -> None:
    script: list[Any] = [chunk(ids=[CALL]), *(chunk(char) for char in text), stop()]
    arrived = ""
    for event in await events(front(*script), tools=[TOOL]):
        if event["type"] == "content_block_delta":
            arrived += event["delta"]["partial_json"]
            pydantic_core.from_json(arrived, allow_partial=True)
    assert arrived == BROKEN[text]


def test_long_arguments_take_linear_time() -> None:
    scanner = ObjectScanner()
    assert scanner.valid_part('{"a": "') == '{"a": "'
    for _ in range(20_000):
        assert scanner.valid_part("word ") == "word "
    assert scanner.valid_part('", "n": ' + "1" * 100_000) == '", "n": '
