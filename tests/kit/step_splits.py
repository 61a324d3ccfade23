"""Runs one sequence of tokens through the adapters in steps of any sizes, and merges their
events.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from dynamo_trtllm.frontend.api.chat import ChatRequest
from dynamo_trtllm.frontend.api.completions import CompletionRequest
from dynamo_trtllm.frontend.api.messages import MessagesRequest
from dynamo_trtllm.frontend.api.request_model import parse
from dynamo_trtllm.frontend.api.response_schemas import ResponseMeta
from dynamo_trtllm.frontend.api.responses import LOGPROBS, ResponseRequest
from dynamo_trtllm.frontend.messages_api.message_builder import (
    MessageBuilder,
    prepare_messages,
)
from dynamo_trtllm.frontend.requests.choice import Choice, ChoiceDelta
from dynamo_trtllm.frontend.requests.completions import CHAT, TEXT
from dynamo_trtllm.frontend.requests.preprocess import (
    GenerationPlan,
    prepare_chat,
    prepare_conversation,
    prepare_text,
)
from dynamo_trtllm.frontend.responses_api import response_builder
from dynamo_trtllm.frontend.responses_api.items import normalized
from dynamo_trtllm.frontend.tokenization.chat_output_parser import ChatOutputParser
from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.frontend.tokenization.output import OutputParser
from dynamo_trtllm.frontend.tokenization.renderer import NO_FORCED_IDS
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    ModelDeploymentCard,
    TokenIds,
    TokenLogprob,
    token_ids,
)
from tests.kit import messages_client
from tests.kit.answer_parts import cut
from tests.unit.frontend.responses_client import EVENT

CARD = ModelDeploymentCard(
    name="m", context_length=1 << 20, vocab_size=201088, eos_token_ids=(200002,), renderer="harmony"
)
RESPONSE = ResponseMeta(id="resp_" + "a" * 40, model="m", created=0)
TOOLS = ("a", "f", "get_weather")
Result = dict[str, Any]


@dataclass(eq=False, kw_only=True)
class OtherFormat(HarmonyRenderer):
    """A renderer with the tokens of gpt-oss and the output parsers of chat templates."""

    reasoning: str = "none"
    calls: str = "none"

    def chat_parser(
        self, *, forced_ids: TokenIds = NO_FORCED_IDS, hidden: frozenset[int] | None = None
    ) -> OutputParser:
        return ChatOutputParser(
            self.text_parser(),
            reasoning_parser=self.reasoning,
            tool_call_parser=self.calls,
            forced_ids=forced_ids,
        )


def served_by(renderer: HarmonyRenderer) -> ServedModel:
    return ServedModel(CARD, renderer)


@dataclass(frozen=True)
class Case:
    """One sequence of tokens, and the options of the request."""

    ids: tuple[int, ...]
    stop: tuple[str, ...] = ()
    has_logprobs: bool = False
    has_token_ids: bool = False
    is_one_call: bool = False
    hides_reasoning: bool = False
    finish: FinishReason = FinishReason.STOP

    def chunks(self, steps: Sequence[int]) -> Iterator[Chunk]:
        pieces = [list(piece) for piece in cut(self.ids, steps)] or [[]]
        for index, piece in enumerate(pieces):
            scored = tuple(TokenLogprob(i, -i / 1000, ((i, -0.5),)) for i in piece)
            yield Chunk(
                token_ids=token_ids(piece),
                logprobs=scored if self.has_logprobs else (),
                finish_reason=self.finish if index == len(pieces) - 1 else None,
            )


def deltas_of(
    case: Case, steps: Sequence[int], plan: GenerationPlan
) -> tuple[list[ChoiceDelta], Choice]:
    """Push the tokens until the choice ends, as the frontend does."""
    state = Choice(plan.choices[0])
    deltas = []
    for chunk in case.chunks(steps):
        deltas.append(state.push(chunk))
        if deltas[-1].finish is not None:
            break
    return deltas, state


# --- chat and text completions --------------------------------------------------------------------


def chat(served: ServedModel, case: Case, steps: Sequence[int]) -> Result:
    """Return the answer, the merged events, and the text in the order of its events."""
    tools = [{"type": "function", "function": {"name": name}} for name in TOOLS]
    fields = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": tools,
        "logprobs": case.has_logprobs,
    }
    fields |= {
        "parallel_tool_calls": not case.is_one_call,
        "include_reasoning": not case.hides_reasoning,
    }
    body = parse(ChatRequest, _json(case, **fields))
    return _completion(CHAT, body, prepare_chat(body, served, body.call("r", 0.0, "")), case, steps)


def text(served: ServedModel, case: Case, steps: Sequence[int]) -> Result:
    body = parse(
        CompletionRequest, _json(case, prompt="hi", logprobs=1 if case.has_logprobs else None)
    )
    return _completion(TEXT, body, prepare_text(body, served, body.call("r", 0.0, "")), case, steps)


def _json(case: Case, **fields: Any) -> bytes:
    common = {
        "model": "m",
        "stream": True,
        "stop": case.stop,
        "return_token_ids": case.has_token_ids,
    }
    return json.dumps(common | fields).encode()


def _completion(
    adapter: Any, body: Any, plan: GenerationPlan, case: Case, steps: Sequence[int]
) -> Result:
    deltas, state = deltas_of(case, steps, plan)
    streamed = adapter.builder(RESPONSE, body, plan)
    whole = adapter.builder(RESPONSE, body, plan)
    data = streamed.start()
    for delta in deltas:
        data += streamed.delta(delta)
        whole.push(delta)
    answer = whole.body(state.usage(), {})
    for call in answer["choices"][0].get("message", {}).get("tool_calls", ()):
        call["id"] = "call"
    return {"answer": answer, **_merged(data), "usage": state.usage()}


def _merged(data: bytes) -> Result:
    runs: list[list[Any]] = []  # field and text, in the order in which clients read them
    logprobs: list[Any] = []
    merged: Result = {"runs": runs, "logprobs": logprobs, "token_ids": [], "finish": None}
    for line in data.decode().split("\n\n"):
        if not line:
            continue
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        merged["token_ids"] += choice.get("token_ids", [])
        merged["finish"] = choice["finish_reason"] or merged["finish"]
        scored = choice["logprobs"] or {}
        if "content" in scored:
            logprobs += scored["content"]
        elif scored:
            logprobs += zip(*scored.values(), strict=True)
        for field, more, is_new in _texts(choice):
            if runs and runs[-1][0] == field and not is_new:
                runs[-1][1] += more
            elif more or is_new:
                runs.append([field, more])
    return merged


def _texts(choice: Result) -> Iterator[tuple[str, str, bool]]:
    """Yield the field, the text, and whether a new call begins."""
    delta = choice.get("delta", choice)
    yield "reasoning", delta.get("reasoning_content", ""), False
    yield "content", delta.get("content", "") + delta.get("text", ""), False
    for call in delta.get("tool_calls", ()):
        name = call["function"].get("name")
        yield (
            f"call {call['index']}",
            (name or "") + call["function"]["arguments"],
            name is not None,
        )


# --- responses ------------------------------------------------------------------------------------


def responses(served: ServedModel, case: Case, steps: Sequence[int]) -> Result:
    """Return the response, and its events with consecutive text deltas merged."""
    tools = [{"type": "function", "name": name} for name in TOOLS]
    fields = {"model": "m", "input": "hi", "tools": tools, "stop": case.stop, "store": False}
    fields |= {"include": [LOGPROBS] if case.has_logprobs else [], "stream": True}
    body = parse(
        ResponseRequest, json.dumps(fields | {"parallel_tool_calls": not case.is_one_call}).encode()
    )
    items = [normalized(item) for item in body.input]  # type: ignore[arg-type]
    conversation = response_builder._conversation(body, items)
    options = response_builder._options(body, served.card)
    plan = prepare_conversation(conversation, options, served, body.call("r", 0.0, ""))
    deltas, state = deltas_of(case, steps, plan)
    builder = response_builder.ResponseBuilder(RESPONSE, body, plan, 1 << 20)
    data = (
        builder.start() + b"".join(map(builder.delta, deltas)) + builder.finish(state.usage(), {})
    )
    return {"events": _merged_events(data), "usage": state.usage()}


def _merged_events(data: bytes) -> list[Result]:
    events: list[Result] = []
    for number, text in enumerate(data.decode().strip().split("\n\n")):
        event = json.loads(text.partition("\ndata: ")[2])
        assert event["sequence_number"] == number
        for item in (event.get("item"), *event.get("response", {}).get("output", ())):
            if item and "call_id" in item:
                item["call_id"] = "call"
        event.get("response", {}).pop("completed_at", None)
        last = events[-1] if events else {}
        if "delta" in event and (last.get("type"), last.get("item_id")) == (
            event["type"],
            event["item_id"],
        ):
            last["delta"] += event["delta"]
            if "logprobs" in event:
                last["logprobs"] += event["logprobs"]
        else:
            events.append(event)
    for event in events:
        EVENT.validate_python(event, strict=True)
        del event["sequence_number"]  # the number of the first of the merged events
    return events


# --- messages ------------------------------------------------------------------------------


def messages(served: ServedModel, case: Case, steps: Sequence[int]) -> Result:
    """Return the whole message, and the events of the stream with consecutive deltas merged."""
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in TOOLS]
    choice = {"type": "auto", "disable_parallel_tool_use": case.is_one_call}
    fields = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    fields |= {"tools": tools, "tool_choice": choice, "stop_sequences": case.stop}
    thinking = {"type": "disabled" if case.hides_reasoning else "adaptive"}
    body = parse(MessagesRequest, json.dumps(fields | {"thinking": thinking}).encode())
    plan = prepare_messages(body, served, body.call("r", 0.0, ""))
    deltas, state = deltas_of(case, steps, plan)
    streamed = MessageBuilder(RESPONSE, plan)
    whole = MessageBuilder(RESPONSE, plan)
    data = streamed.start() + b"".join(map(streamed.delta, deltas))
    data += streamed.finish(state.usage(), {})
    for delta in deltas:
        whole.push(delta)
    message = json.loads(orjson.dumps(whole.body(state.usage(), {})))
    events = _merged_deltas(messages_client.parsed(data.decode()))
    for block in (*message["content"], *(event.get("content_block", {}) for event in events)):
        if "id" in block:
            block["id"] = "toolu"
    return {"message": message, "events": events, "usage": state.usage()}


def _merged_deltas(events: list[Result]) -> list[Result]:
    messages_client.check_order(events)
    merged: list[Result] = []
    for event in events:
        last = merged[-1] if merged else {}
        delta = event.get("delta", {})
        before = last.get("delta", {})
        if last.get("index") == event.get("index") and "type" in delta:
            if before.get("type") == delta["type"]:
                field = next(name for name in delta if name != "type")
                before[field] += delta[field]
                continue
        merged.append(event)
    return merged


def output(result: Result) -> list[tuple[str, str | None, str]]:
    """Return type, phase or name, and text of each output item."""
    items = result["events"][-1]["response"]["output"]
    return [
        (
            (item["type"], item.get("phase", item.get("name")), item["arguments"])
            if item["type"] == "function_call"
            else (item["type"], item.get("phase"), item["content"][0]["text"])
        )
        for item in items
    ]
