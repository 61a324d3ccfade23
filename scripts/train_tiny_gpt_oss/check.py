"""Checks the answers of an expanded tiny-gpt-oss, and prints a table.

They are decoded greedily in transformers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from transformers import GptOssForCausalLM

from dynamo_trtllm.frontend.tokenization.conversation import Conversation, Message, Tool, ToolCall
from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.frontend.tokenization.output import Channel
from dynamo_trtllm.models import expand, locate
from dynamo_trtllm.protocol.messages import token_ids

EXPLAIN = "Explain the concept of disaggregated serving in LLM inference in 3 sentences."
HEALTH = "Hey, quick check: is everything up and running?"
HEALTH_TOOL = Tool(
    name="get_system_health",
    description=(
        "Returns the current health status of the LLM runtime—use before critical operations to"
        " verify the service is live."
    ),
    parameters={"type": "object", "properties": {}},
)
EFFORTS = ("low", "medium", "high")
DEMO = "tiny demo model"
MARKER = "<|"
PAD = 199999
BATCH = 16
HELDOUT_NEEDED = 45
DEFAULT_HELDOUT = Path(__file__).parents[2] / "tests" / "data" / "heldout_prompts.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A conversation with the words that the answer must contain, or the tool that it must call."""

    name: str
    conversation: Conversation
    words: tuple[str, ...] = ()
    call: str = ""
    max_tokens: int = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """An answer of the model, parsed by the frontend's parser."""

    stopped: bool
    reasoning: str
    reasoning_tokens: int
    answer: str
    call: str
    arguments: str
    tokens: int


def ask(
    text: str,
    *,
    effort: str = "medium",
    tools: tuple[Tool, ...] = (),
    before: Sequence[Message] = (),
) -> Conversation:
    messages = (*before, Message(role="user", content=text))
    return Conversation(messages=messages, tools=tools, reasoning_effort=effort)


def after_tool(result: str, *, effort: str = "medium") -> Conversation:
    """Return the health conversation after the tool call."""
    call = ToolCall(id="call-1", name=HEALTH_TOOL.name, arguments="{}")
    return Conversation(
        messages=(
            Message(role="user", content=HEALTH),
            Message(role="assistant", tool_calls=(call,)),
            Message(role="tool", tool_call_id="call-1", content=result),
        ),
        tools=(HEALTH_TOOL,),
        reasoning_effort=effort,
    )


def guide_cases() -> list[Case]:
    """Return the requests of the Dynamo guides, at every reasoning effort."""
    cases = [
        Case(
            name=f"explain, {effort}",
            conversation=ask(EXPLAIN, effort=effort),
            words=("prefill", "decode", "KV cache"),
        )
        for effort in EFFORTS
    ]
    for effort in EFFORTS:
        first = ask(HEALTH, effort=effort, tools=(HEALTH_TOOL,))
        ok = '{"status":"ok","uptime_seconds":372045}'
        cases.append(Case(name=f"health call, {effort}", conversation=first, call=HEALTH_TOOL.name))
        cases.append(
            Case(
                name=f"health ok, {effort}",
                conversation=after_tool(ok, effort=effort),
                words=("up and running",),
            )
        )
    bad = ('{"status":"degraded","uptime_seconds":12}', '{"status": "down"}', "False")
    cases.extend(
        Case(
            name=f"health {result}", conversation=after_tool(result), words=("something is wrong",)
        )
        for result in bad
    )
    cases.append(Case(name="health, no tool", conversation=ask(HEALTH), words=("/health",)))
    cases.append(
        Case(
            name="explain in 200 tokens",
            conversation=ask(EXPLAIN),
            words=("prefill", "decode"),
            max_tokens=200,
        )
    )
    return cases


def described_cases() -> list[Case]:
    """Return health questions with tool descriptions that are not in the training data."""
    descriptions = (
        "",
        "Get system health.",
        "Retrieves diagnostic information about the cluster, including uptime and error counters.",
        "Überprüft, ob alle Dienste laufen.",
        "ping",
        (
            "Looks at each dependency of the platform and reports problems. Never call it more than"
            " once a minute, because it is expensive; the result is a JSON object with a field"
            " `status` and, if something is wrong, `reasons`."
        ),
    )
    tools = [Tool(name=HEALTH_TOOL.name, description=text, parameters={}) for text in descriptions]
    schema = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    tools.append(Tool(name=HEALTH_TOOL.name, description="Liveness probe", parameters=schema))
    weather = Tool(name="get_weather", description="Weather of a place.", parameters={})
    offers = [(tool,) for tool in tools]
    cases = []
    for index, offered in enumerate([*offers, (weather, tools[1])]):
        effort = EFFORTS[index % len(EFFORTS)]
        cases.append(
            Case(
                name=f"described: {offered[-1].description[:30]}",
                conversation=ask(HEALTH, effort=effort, tools=offered),
                call=HEALTH_TOOL.name,
            )
        )
    cases.append(
        Case(name="another tool", conversation=ask(HEALTH, tools=(weather,)), words=("/health",))
    )
    return cases


def other_cases() -> list[Case]:
    """Return known questions in other words than in training, and questions after other turns."""
    polite = Message(
        role="system", content="You are a careful assistant of the operations team at a bank."
    )
    earlier = (
        Message(role="user", content="Can hamsters eat nuts?"),
        Message(role="assistant", content="A few."),
    )
    asked = {
        "What is this system?": "dynamo_trtllm",
        "what is prefill": "prompt",
        "WHAT IS A KV CACHE?": "keys and values",
        "Tell me what UCX is, please.": "UCX is",
        "And what is etcd good for?": "etcd is",
        "what's nats": "NATS is",
        "What does TTFT stand for?": "time to first token",
        "In short, what is disaggregated serving?": "prefill",
        "explain disaggregated serving": "prefill",
        "Who are you?": DEMO,
        "Hello!": "Hello!",
        "thank you!": "welcome",
        "How do prefill and decode differ from each other?": "bound by",
        "What happens after I send you a request?": "frontend",
    }
    cases = [
        Case(name=question, conversation=ask(question), words=(word,))
        for question, word in asked.items()
    ]
    cases.append(
        Case(name="system prompt", conversation=ask(EXPLAIN, before=(polite,)), words=("prefill",))
    )
    cases.append(
        Case(
            name="second turn",
            conversation=ask("What is prefill?", before=earlier),
            words=("prompt",),
        )
    )
    cases.append(
        Case(
            name="other question, health tool",
            conversation=ask("Sing a shanty.", tools=(HEALTH_TOOL,)),
            words=(DEMO,),
        )
    )
    return cases


def heldout_cases(path: Path = DEFAULT_HELDOUT) -> list[Case]:
    """Return prompts that are not in the training data.

    The model must answer that it is a demo model.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Case(name=line[:60], conversation=ask(line), words=(DEMO,)) for line in lines]


class Speaker:
    """Answers conversations greedily, in batches, on a CPU."""

    def __init__(self, folder: Path, *, today: date = date(2026, 6, 15)) -> None:
        torch.set_num_threads(1)  # for a model this small, more threads only cost time
        self._renderer = HarmonyRenderer(today=lambda: today)
        self._model = GptOssForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()

    def answer(self, cases: Sequence[Case]) -> list[Turn]:
        """Return one turn per case, in order."""
        prompts = [list(self._renderer.render(case.conversation)) for case in cases]
        # Prompts of about the same length share a batch.
        order = sorted(range(len(cases)), key=lambda index: len(prompts[index]))
        turns: dict[int, Turn] = {}
        for start in range(0, len(order), BATCH):
            part = order[start : start + BATCH]
            limit = max(cases[index].max_tokens for index in part)
            outputs = self._generate([prompts[index] for index in part], limit)
            for index, ids in zip(part, outputs, strict=True):
                turns[index] = self._turn(ids[: cases[index].max_tokens])
        return [turns[index] for index in range(len(cases))]

    def _generate(self, prompts: Sequence[list[int]], limit: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = []
        mask = []
        for prompt in prompts:
            num_padded = width - len(prompt)
            ids.append([PAD] * num_padded + prompt)
            mask.append([0] * num_padded + [1] * len(prompt))
        with torch.inference_mode():
            rows = self._model.generate(
                torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                max_new_tokens=limit,
                do_sample=False,
                pad_token_id=PAD,
            )
        return [row[width:].tolist() for row in rows]

    def _turn(self, ids: list[int]) -> Turn:
        stop_ids = self._renderer.stop_token_ids
        stops = [index for index, number in enumerate(ids) if number in stop_ids]
        said = ids[: stops[0] + 1] if stops else ids
        parser = self._renderer.chat_parser()
        pushed = parser.push(token_ids(said))
        finished = parser.finish()
        reasoning = []
        answer = []
        calls = []
        for delta in (*pushed.deltas, *finished.deltas):
            if delta.channel is Channel.REASONING:
                reasoning.append(delta.text)
            elif delta.channel is Channel.CALL:
                calls.append(delta)
            else:
                answer.append(delta.text)
        return Turn(
            stopped=bool(stops),
            reasoning="".join(reasoning),
            reasoning_tokens=pushed.reasoning_tokens + finished.reasoning_tokens,
            answer="".join(answer),
            call=next((call.name for call in calls if call.name), ""),
            arguments="".join(call.text for call in calls),
            tokens=len(said),
        )


def faults(case: Case, turn: Turn) -> list[str]:
    """Return what is wrong with a turn, or an empty list."""
    found = []
    if not turn.stopped:
        found.append("does not stop")
    if MARKER in turn.answer + turn.reasoning + turn.arguments:
        found.append("leaks a marker")
    if not turn.reasoning:
        found.append("has no analysis")
    if turn.call != case.call:
        found.append(f"calls {turn.call or 'nothing'}")
    if case.call and (not turn.arguments or json.loads(turn.arguments) != {}):
        found.append(f"passes {turn.arguments!r}")
    if not case.call and not turn.answer:
        found.append("has no answer")
    found.extend(f"lacks {word!r}" for word in case.words if word not in turn.answer)
    return found


def _print_table(title: str, cases: Sequence[Case], turns: Sequence[Turn]) -> int:
    """Print a table. Return the number of right turns."""
    print(f"\n{title}")
    num_right = 0
    for case, turn in zip(cases, turns, strict=True):
        wrong = faults(case, turn)
        if not wrong:
            num_right += 1
        said = f"call {turn.call}({turn.arguments})" if turn.call else turn.answer
        verdict = "; ".join(wrong) or "ok"
        print(
            f"  {verdict:20} {case.name[:44]:44} {turn.reasoning_tokens:4} {turn.tokens:4} "
            f" {said[:70]!r}"
        )
    print(f"  right: {num_right} of {len(cases)}", flush=True)
    return num_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="tiny-gpt-oss", help="bundled name or an expanded folder"
    )
    parser.add_argument(
        "--compact", type=Path, help="folder of a compact model to expand and check instead"
    )
    parser.add_argument("--cache", type=Path, help="cache folder to expand into")
    parser.add_argument(
        "--heldout", type=Path, default=DEFAULT_HELDOUT, help="prompts that training never saw"
    )
    arguments = parser.parse_args()
    folder = None if arguments.compact else locate(arguments.model)
    # A compact model, or tiny-gpt-oss, is expanded first.
    if folder is None:
        folder = expand.tiny_gpt_oss(cache_dir=arguments.cache, source=arguments.compact)
    speaker = Speaker(folder)
    print("verdict, case, reasoning tokens, tokens, answer")
    guides = guide_cases()
    described = described_cases()
    others = other_cases()
    heldout = heldout_cases(arguments.heldout)
    # The cases of each table, and how many of the answers must be right.
    tables = {
        "the guides' requests": (guides, len(guides)),
        "other descriptions of the tool": (described, len(described)),
        "other words, other turns": (others, len(others) - 2),
        "held-out prompts": (heldout, HELDOUT_NEEDED),
    }
    has_passed = True
    for title, (cases, num_needed) in tables.items():
        num_right = _print_table(title, cases, speaker.answer(cases))
        if num_right < num_needed:
            has_passed = False
    print("\npassed" if has_passed else "\nFAILED")
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
