"""Pieces in any order: all their text is in the items and in the deltas, and every event fits the ones before it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynamo_trtllm.frontend.generation.choice import ChoiceDelta
from dynamo_trtllm.frontend.generation.responses.items import OutputBuilder, TextDelta, messages_of
from dynamo_trtllm.messages import TokenLogprob
from dynamo_trtllm.tokenization.base import ToolCallDelta
from tests.unit.frontend.app_helpers import CharacterRenderer
from tests.unit.frontend.responses_client import EVENT

RESPONSE = "resp_" + "a" * 40
WORDS = st.text(alphabet='ab{}"\n é', max_size=4)


@st.composite
def scripts(draw: st.DrawFn) -> list[ChoiceDelta]:
    """Pieces as a parser makes them: the parts of a call come one after the other."""
    script: list[ChoiceDelta] = []
    calls = 0
    for kind in draw(
        st.lists(st.sampled_from(["content", "reasoning", "both", "call", "logprobs", "nothing"]), max_size=12)
    ):
        words, more = draw(WORDS), draw(WORDS)
        match kind:
            case "content":
                script.append(ChoiceDelta(content=words))
            case "reasoning":
                script.append(ChoiceDelta(reasoning=words))
            case "both":
                script.append(ChoiceDelta(reasoning=words, content=more))
            case "logprobs":
                script.append(ChoiceDelta(content=words, logprobs=(TokenLogprob(97, -0.5, ((98, -1.0),)),)))
            case "call":
                name = ToolCallDelta(index=calls, name="f", arguments=draw(st.sampled_from(["", words])))
                script.append(ChoiceDelta(tool_calls=(name,)))
                script += [
                    ChoiceDelta(tool_calls=(ToolCallDelta(index=calls, arguments=each),)) for each in (words, more)
                ]
                calls += 1
            case _:
                script.append(ChoiceDelta())
    return script


def run(script: list[ChoiceDelta]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    transcript = OutputBuilder(RESPONSE, CharacterRenderer())
    events = [each for region in script for each in transcript.push(region)]
    events += transcript.finish("completed")
    return [
        each.template | {"delta": each.text} if isinstance(each, TextDelta) else each for each in events
    ], transcript.items("completed")


def text_of(items: list[dict[str, Any]], kind: str) -> str:
    return "".join(item["content"][0]["text"] for item in items if item["type"] == kind)


@given(scripts())
def test_pieces_then_nothing_of_them_is_lost(script: list[ChoiceDelta]) -> None:
    _, items = run(script)
    assert text_of(items, "reasoning") == "".join(region.reasoning for region in script)
    assert text_of(items, "message") == "".join(region.content for region in script)
    deltas = [call for region in script for call in region.tool_calls]
    calls = [item for item in items if item["type"] == "function_call"]
    assert len(calls) == sum(delta.name is not None for delta in deltas)
    for index, call in enumerate(calls):
        assert call["arguments"] == "".join(delta.arguments for delta in deltas if delta.index == index)
    assert len({item["id"] for item in items}) == len(items)
    assert len({call["call_id"] for call in calls}) == len(calls)


@given(scripts())
def test_events_then_each_item_opens_grows_and_ends_in_turn(script: list[ChoiceDelta]) -> None:
    events, items = run(script)
    texts: list[str] = []
    for event in events:
        EVENT.validate_python(event | {"sequence_number": 0}, strict=True)
        assert event["output_index"] == max(0, len(texts) - 1) or event["type"] == "response.output_item.added"
        match event["type"].removeprefix("response.").rpartition(".")[2]:
            case "added" if "item" in event:
                assert event["output_index"] == len(texts)
                texts.append("")
            case "delta":
                texts[-1] += event["delta"]
            case "done" if "item" in event:
                assert event["item"] == items[len(texts) - 1]
            case "done":
                assert texts[-1] == event.get("text", event.get("arguments", texts[-1]))
    assert texts == [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in items]


@given(scripts())
def test_items_when_they_are_shown_again_then_text_and_calls_are_whole(script: list[ChoiceDelta]) -> None:
    _, items = run(script)
    messages = messages_of(items)
    assert [call.arguments for message in messages for call in message.tool_calls] == [
        item["arguments"] for item in items if item["type"] == "function_call"
    ]
    shown = "".join(message.content.replace("\n", "") for message in messages)
    assert shown == text_of(items, "message").replace("\n", "")
    assert all(message.role == "assistant" for message in messages)
