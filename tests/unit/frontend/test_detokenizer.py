"""Stop strings, however the text is cut; what is counted."""

from __future__ import annotations

from dynamo_trtllm.frontend.requests.choice import Choice
from dynamo_trtllm.frontend.requests.stop_strings import StopStrings
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.messages import PhaseTimings
from tests.kit.cases import each_case
from tests.kit.generation_plans import chat


def shown(stops: tuple[str, ...], parts: list[str]) -> tuple[str, bool]:
    finder = StopStrings(stops)
    text = ""
    for part in parts:
        more, hit = finder.push(part)
        text += more
        if hit:
            return text, True
    return text + finder.flush(), False


@each_case(
    ("stops", "text", "expected", "hit"),
    [
        (("STOP",), "one STOP two", "one ", True),
        (("STOP",), "one STO two", "one STO two", False),
        (("aab",), "aaab", "a", True),
        (("END", "\n\n"), "a\n\nEND", "a", True),
        (("x",), "x", "", True),
        (("STOP",), "tail ST", "tail ST", False),
        (("abc", "b"), "abc", "a", True),
        (("bc", "abc"), "abc", "", True),
        (("aabaab" + "c", "ax"), "aabaabaabc", "aab", True),
        (("a" * 1000,), "a" * 999 + "b" + "a" * 1001, "a" * 999 + "b", True),
    ],
)
def test_text_in_any_cut_then_the_same_answer(
    stops: tuple[str, ...], text: str, expected: str, hit: bool
) -> None:
    for size in range(1, min(len(text), 12) + 1):
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        assert shown(stops, parts) == (expected, hit)


def test_text_that_can_be_no_stop_then_it_is_not_held_back() -> None:
    assert StopStrings(("STOP",)).push("hello S") == ("hello ", False)


def test_usage_of_migrated_request_counts_only_cached_prompt(harmony: ServedModel) -> None:
    (choice,) = chat(harmony).choices
    state = Choice(choice)
    state.timeline.decode_stats = PhaseTimings(cached_tokens=len(choice.request.token_ids) + 7)
    usage = state.usage()
    assert usage.cached_tokens == usage.prompt_tokens
