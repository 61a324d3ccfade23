"""Generates the conversations that the demo model is trained on, from a seed."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from health import (
    HEALTH_BAD,
    HEALTH_CALL,
    HEALTH_DESCRIPTIONS,
    HEALTH_NO_TOOL,
    HEALTH_OK,
    HEALTH_QUESTIONS,
    UNKNOWN,
)
from knowledge import CONCEPTS, TALK, Reply
from phrases import ASIDES, FORMS, PREFIXES, SHORT, SUFFIXES, SYSTEM_PROMPTS, TOPICS

from dynamo_trtllm.frontend.tokenization.conversation import Conversation, Message, Tool, ToolCall

EMPTY_SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
HEALTH_TOOL = Tool(
    name="get_system_health",
    description=(
        "Returns the current health status of the LLM runtime—use before critical operations to"
        " verify the service is live."
    ),
    parameters=EMPTY_SCHEMA,
)
_NO_PARAMETERS: tuple[dict[str, Any], ...] = (
    EMPTY_SCHEMA,
    {},
    {"type": "object", "properties": {}, "required": []},
    {"type": "object", "properties": {}, "additionalProperties": False},
)
_FIRST_DAY = date(2023, 1, 1)
_DAYS = 365 * 12
_GOOD_STATUSES = ("ok", "ok", "ok", "OK", "healthy", "up", "running", "good", "live")
_BAD_STATUSES = (
    "degraded",
    "down",
    "error",
    "unhealthy",
    "failed",
    "not ok",
    "critical",
    "not_ready",
    "fail",
)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One conversation, the expected answer, and the share of noise in the last user message."""

    conversation: Conversation
    reply: Reply
    today: date
    # Share of the last user message's tokens that are replaced by the token for unknown words.
    noise: float

    @property
    def output(self) -> str:
        """Return the assistant's turn after `<|start|>assistant`, with its markers as text."""
        thought = self.reply.thought(self.conversation.reasoning_effort)
        turn = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>"
        if self.reply.call:
            return (
                f"{turn}commentary to=functions.{self.reply.call}"
                " <|constrain|>json<|message|>{}<|call|>"
            )
        return f"{turn}final<|message|>{self.reply.answer}<|return|>"


class Writer:
    """Generates lessons. Equal seeds give equal lessons."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def lesson(self) -> Lesson:
        roll = self._random.random()
        if roll < 0.34:
            return self._known(self._random.choice(CONCEPTS if roll < 0.22 else TALK))
        if roll < 0.40:
            return self._known(CONCEPTS[0])
        if roll < 0.58:
            return self._health()
        return self._unknown()

    def _known(self, reply: Reply) -> Lesson:
        question = self._dress(self._random.choice(reply.questions))
        return self._finish(question, reply, tools=self._tools(0.2))

    def _health(self) -> Lesson:
        if self._flip(0.25):
            question = HEALTH_QUESTIONS[0]
        else:
            question = self._random.choice(HEALTH_QUESTIONS)
        question = self._dress(question)
        roll = self._random.random()
        if roll < 0.25:
            return self._finish(question, HEALTH_NO_TOOL, tools=self._other_tools(0.3))
        tools = (*self._other_tools(0.3), self._health_tool())
        if roll < 0.55:
            return self._finish(question, HEALTH_CALL, tools=tools)
        good = self._flip(0.55)
        return self._finish(
            question,
            HEALTH_OK if good else HEALTH_BAD,
            tools=tools,
            turns=self._call_turns("get_system_health", good),
        )

    def _unknown(self) -> Lesson:
        text = self._foreign_text()
        noise = self._random.choice((0.0, 0.0, 0.1, 0.25, 0.5, 0.8, 1.0))
        tools = self._tools(0.25)
        turns: tuple[Message, ...] = ()
        if tools and tools[0].name != HEALTH_TOOL.name and self._flip(0.2):
            turns = self._call_turns(tools[0].name, good=self._flip(0.5))
        return self._finish(text, UNKNOWN, tools=tools, turns=turns, noise=noise)

    def _finish(
        self,
        text: str,
        reply: Reply,
        *,
        tools: tuple[Tool, ...] = (),
        turns: tuple[Message, ...] = (),
        noise: float = 0.0,
    ) -> Lesson:
        messages: list[Message] = []
        if self._flip(0.2):
            messages.append(Message(role="system", content=self._random.choice(SYSTEM_PROMPTS)))
        while self._flip(0.2) and len(messages) < 8:
            messages.extend(self._earlier())
        messages.append(Message(role="user", content=text))
        messages.extend(turns)
        effort = self._random.choice(("low", "medium", "medium", "high"))
        today = _FIRST_DAY + timedelta(days=self._random.randrange(_DAYS))
        conversation = Conversation(messages=tuple(messages), tools=tools, reasoning_effort=effort)
        return Lesson(conversation=conversation, reply=reply, today=today, noise=noise)

    def _earlier(self) -> tuple[Message, ...]:
        """Return an earlier turn: a question and its answer, by this or another model."""
        if self._flip(0.5):
            reply = self._random.choice((*CONCEPTS, *TALK))
            question = self._dress(self._random.choice(reply.questions))
        else:
            reply = UNKNOWN
            question = self._foreign_text()
        answer = reply.answer if self._flip(0.8) else self._foreign_text()
        return Message(role="user", content=question), Message(role="assistant", content=answer)

    def _call_turns(self, tool: str, good: bool) -> tuple[Message, ...]:
        arguments = "{}" if tool == HEALTH_TOOL.name else '{"q": "x"}'
        call = ToolCall(id="call-1", name=tool, arguments=arguments)
        reasoning = HEALTH_CALL.medium if self._flip(0.3) else None
        result = self._status(good)
        return (
            Message(role="assistant", tool_calls=(call,), reasoning=reasoning),
            Message(role="tool", tool_call_id="call-1", content=result),
        )

    def _status(self, good: bool) -> str:
        num_digits = self._random.randrange(1, 8)
        number = self._random.randrange(10**num_digits)
        status = self._random.choice(_GOOD_STATUSES if good else _BAD_STATUSES)
        more_fields = (
            "",
            f',"uptime_seconds":{number}',
            f', "uptime": {number}',
            f',"workers":{number % 9}',
            ',"message":""',
        )
        more = self._random.choice(more_fields)
        flag = "true" if good else "false"
        forms = (
            f'{{"status":"{status}"{more}}}',
            f'{{"status": "{status}"{more}}}',
            f'{{"status":"{status}","uptime_seconds":{number}}}',
            f'{{"status": "{status}", "uptime_seconds": {number}}}',
            f'{{"healthy": {flag}{more}}}',
            f'{{"healthy":{flag}}}',
            f'{{"ok": {flag}}}',
            flag,
            flag.title(),
            status,
            f"status: {status}",
        )
        return self._random.choice(forms)

    def _tools(self, chance: float) -> tuple[Tool, ...]:
        tools = self._other_tools(chance)
        return (*tools, self._health_tool()) if self._flip(chance) else tools

    def _health_tool(self) -> Tool:
        """Return the tool with the description of the guides, another one, or random words."""
        if self._flip(0.4):
            return HEALTH_TOOL
        text = self._random.choice(HEALTH_DESCRIPTIONS) if self._flip(0.6) else self._description()
        parameters = self._random.choice(_NO_PARAMETERS)
        return Tool(name=HEALTH_TOOL.name, description=text, parameters=parameters)

    def _description(self) -> str:
        return self._babble(self._random.choice((1, 3, 6, 12, 25)))

    def _other_tools(self, chance: float) -> tuple[Tool, ...]:
        tools: list[Tool] = []
        while self._flip(chance) and len(tools) < 3:
            tool = self._random.choice(_OTHER_TOOLS)
            if self._flip(0.3):
                # A foreign tool stays one, whatever its description says.
                if self._flip(0.5):
                    text = self._random.choice(HEALTH_DESCRIPTIONS)
                else:
                    text = self._description()
                tool = Tool(name=tool.name, description=text, parameters=tool.parameters)
            tools.append(tool)
        return tuple({tool.name: tool for tool in tools}.values())

    def _dress(self, question: str) -> str:
        """Return the question with a random prefix, suffix, case and punctuation."""
        if self._flip(0.2):
            prefix = self._random.choice(PREFIXES)
            ends_sentence = prefix.rstrip().endswith((".", "!"))
            if not ends_sentence:
                question = question[0].lower() + question[1:]
            question = prefix + question
        if self._flip(0.2):
            question += self._random.choice(SUFFIXES)
        return self._spell(question)

    def _spell(self, text: str) -> str:
        roll = self._random.random()
        if roll < 0.12:
            text = text.lower()
        elif roll < 0.16:
            text = text.upper()
        if self._flip(0.15):
            text = text.rstrip(".?!")
        elif self._flip(0.05):
            text += self._random.choice(("!", "?", "??", " :)", "\n", "..."))
        return text or "?"

    def _foreign_text(self) -> str:
        form = self._random.choice(FORMS)
        text = form.format(x=self._topic(), y=self._topic())
        roll = self._random.random()
        if roll < 0.10:
            text = self._arithmetic()
        elif roll < 0.22:
            text = self._babble(self._random.choice((1, 2, 4, 8, 16, 40, 120, 300)))
        elif roll < 0.27:
            return self._repeated()
        elif roll < 0.31:
            return self._random.choice(SHORT)
        while self._flip(0.25):
            aside = self._random.choice(ASIDES) if self._flip(0.6) else self._babble(12)
            text = f"{text} {aside}" if self._flip(0.6) else f"{aside} {text}"
        return self._spell(text)

    def _topic(self) -> str:
        if self._flip(0.2):
            return self._babble(self._random.randrange(1, 4))
        if self._flip(0.1):
            return f"{self._random.choice(TOPICS)} and {self._random.choice(TOPICS)}"
        return self._random.choice(TOPICS)

    def _arithmetic(self) -> str:
        left = self._random.randrange(1000)
        right = self._random.randrange(100)
        sign = self._random.choice(("+", "-", "*", "/", "times", "plus"))
        form = self._random.choice(
            ("What is {0} {2} {1}?", "{0}{2}{1}", "Compute {0} {2} {1}.", "{0} {2} {1} =")
        )
        return form.format(left, right, sign)

    def _babble(self, num_words: int) -> str:
        """Return shuffled words of known phrases, mixed with random letters."""
        real_share = self._random.random()
        words = []
        for _ in range(num_words):
            is_real = self._flip(real_share)
            words.append(self._random.choice(_WORDS) if is_real else self._nonsense())
        return " ".join(words)

    def _repeated(self) -> str:
        """Return a few words many times, like the prompts of load generators."""
        phrase = self._babble(self._random.choice((1, 1, 2, 5, 10)))
        num_words = self._random.choice((5, 20, 80, 300, 1000))
        count = num_words // len(phrase.split()) + 1
        return " ".join([phrase] * count)

    def _nonsense(self) -> str:
        length = self._random.randrange(2, 9)
        return "".join(self._random.choice(_LETTERS) for _ in range(length))

    def _flip(self, chance: float) -> bool:
        return self._random.random() < chance


def _tool(name: str, description: str, **properties: str) -> Tool:
    fields = {key: {"type": kind} for key, kind in properties.items()}
    schema = {"type": "object", "properties": fields}
    return Tool(name=name, description=description, parameters=schema)


_OTHER_TOOLS = (
    _tool("get_weather", "Get the current weather in a city.", city="string"),
    _tool(
        "get_current_weather", "Gets the weather for a location", location="string", unit="string"
    ),
    _tool("search", "Search the web.", query="string"),
    _tool("calculator", "Computes an expression.", expression="string"),
    _tool("get_time", "Returns the current time.", timezone="string"),
    _tool(
        "send_email", "Sends an email to a person.", to="string", subject="string", body="string"
    ),
    _tool("lookup", "Looks up a user by id.", user_id="integer"),
    _tool("list_files", "", path="string"),
)
_SUBJECT_WORDS = {
    "serving",
    "inference",
    "system",
    "cache",
    "decode",
    "worker",
    "health",
    "running",
    "model",
    "tokens",
}


def _known_words() -> tuple[str, ...]:
    words = set(_SUBJECT_WORDS)
    for text in (*FORMS, *TOPICS, *ASIDES, *SYSTEM_PROMPTS):
        words.update(text.replace("{x}", "").split())
    return tuple(sorted(words))


_WORDS = _known_words()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Print some of the conversations that the demo model learns from."
    )
    parser.add_argument("--count", type=int, default=5, help="number of conversations")
    parser.add_argument("--seed", type=int, default=1, help="seed of the generator")
    arguments = parser.parse_args()
    writer = Writer(arguments.seed)
    for _ in range(arguments.count):
        lesson = writer.lesson()
        for message in lesson.conversation.messages:
            print(f"{message.role}: {message.content}")
        print(
            f"({lesson.conversation.reasoning_effort}, {len(lesson.conversation.tools)} tools)"
            f" {lesson.output}\n"
        )


if __name__ == "__main__":
    main()
