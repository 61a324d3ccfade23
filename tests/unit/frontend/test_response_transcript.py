"""Pieces in any order: all their text is in the items and in the deltas, and every event fits the
ones before it.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynamo_trtllm.frontend.requests.choice import ChoiceDelta
from dynamo_trtllm.frontend.responses_api.items import OutputBuilder, TextDelta, messages_of
from dynamo_trtllm.frontend.tokenization.output import Channel, Delta
from dynamo_trtllm.protocol.messages import TokenLogprob
from tests.kit.frontend_app import CharacterRenderer
from tests.unit.frontend.responses_client import EVENT

RESPONSE = "resp_" + "a" * 40
WORDS = st.text(alphabet='ab{}"\n é', max_size=4)


TEXTS = (Channel.REASONING, Channel.COMMENTARY, Channel.FINAL, Channel.CONTENT)


@st.composite
def scripts(draw: st.DrawFn) -> list[ChoiceDelta]:
    """Steps as a parser makes them, of any size: the parts of a call come one after the other."""
    deltas: list[Delta] = []
    calls = 0
    for channel in draw(st.lists(st.sampled_from(Channel), max_size=12)):
        words = draw(WORDS)
        more = draw(WORDS)
        if channel is Channel.CALL:
            deltas += [
                Delta(
                    channel=channel,
                    call_index=calls,
                    name="f",
                    text=draw(st.sampled_from(["", words])),
                ),
                *(
                    Delta(channel=channel, call_index=calls, text=text)
                    for text in (words, more)
                    if text
                ),
            ]
            calls += 1
        elif channel is Channel.REASONING:
            deltas.append(Delta(channel=channel, text=words or "r"))
        else:
            scored = draw(st.sampled_from([(), (TokenLogprob(97, -0.5, ((98, -1.0),)),)]))
            if words or scored:
                deltas.append(Delta(channel=channel, text=words, logprobs=scored))
    script: list[ChoiceDelta] = []
    while deltas:
        size = draw(st.integers(0, 4))
        script.append(ChoiceDelta(deltas=tuple(deltas[:size])))
        del deltas[:size]
    return script


def texts_of(script: list[ChoiceDelta], *channels: Channel) -> str:
    return "".join(
        delta.text for step in script for delta in step.deltas if delta.channel in channels
    )


def run(script: list[ChoiceDelta]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    transcript = OutputBuilder(RESPONSE, CharacterRenderer())
    events = [event for region in script for event in transcript.push(region)]
    events += transcript.finish("completed")
    return [
        event.template | {"delta": event.text} if isinstance(event, TextDelta) else event
        for event in events
    ], transcript.items("completed")


def text_of(items: list[dict[str, Any]], kind: str) -> str:
    return "".join(item["content"][0]["text"] for item in items if item["type"] == kind)


@given(scripts())
def test_pieces_then_nothing_of_them_is_lost(script: list[ChoiceDelta]) -> None:
    _, items = run(script)
    assert text_of(items, "reasoning") == texts_of(script, Channel.REASONING)
    assert text_of(items, "message") == texts_of(script, *TEXTS[1:])
    deltas = [delta for step in script for delta in step.deltas if delta.channel is Channel.CALL]
    calls = [item for item in items if item["type"] == "function_call"]
    assert len(calls) == sum(delta.name is not None for delta in deltas)
    for index, call in enumerate(calls):
        assert call["arguments"] == "".join(
            delta.text for delta in deltas if delta.call_index == index
        )
    assert len({item["id"] for item in items}) == len(items)
    assert len({call["call_id"] for call in calls}) == len(calls)


@given(scripts())
def test_steps_then_items_are_in_the_order_of_generation(script: list[ChoiceDelta]) -> None:
    _, items = run(script)
    kinds = {"commentary": Channel.COMMENTARY, "final_answer": Channel.FINAL, None: Channel.CONTENT}
    others = {"reasoning": Channel.REASONING, "function_call": Channel.CALL}
    found = [others.get(item["type"]) or kinds[item.get("phase")] for item in items]
    expected: list[Channel] = []
    for delta in (delta for step in script for delta in step.deltas if delta.text or delta.name):
        if delta.name is not None or not expected or expected[-1] is not delta.channel:
            expected.append(delta.channel)
    assert found == expected


@given(scripts())
def test_events_then_each_item_opens_grows_and_ends_in_turn(script: list[ChoiceDelta]) -> None:
    events, items = run(script)
    texts: list[str] = []
    for event in events:
        EVENT.validate_python(event | {"sequence_number": 0}, strict=True)
        assert (
            event["output_index"] == max(0, len(texts) - 1)
            or event["type"] == "response.output_item.added"
        )
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
    assert texts == [
        item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in items
    ]


@given(scripts())
def test_items_shown_again_are_complete(script: list[ChoiceDelta]) -> None:
    _, items = run(script)
    messages = messages_of(items)
    assert [call.arguments for message in messages for call in message.tool_calls] == [
        item["arguments"] for item in items if item["type"] == "function_call"
    ]
    shown = "".join((message.preamble + message.content).replace("\n", "") for message in messages)
    assert shown == text_of(items, "message").replace("\n", "")
    assert all(message.role == "assistant" for message in messages)
