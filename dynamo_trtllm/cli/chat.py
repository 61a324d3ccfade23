"""`python -m dynamo_trtllm.chat`: a conversation with a running frontend, in a terminal or line by line from a pipe."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Final, TextIO

from dynamo_trtllm.cli.chat_turn import ChatFailed, ChatTurn, Screen, models, stream_chat
from dynamo_trtllm.config.commands import ChatConfig
from dynamo_trtllm.config.load import exit_with, is_color_refused, load
from dynamo_trtllm.errors import ConfigError

PROG: Final = "python -m dynamo_trtllm.chat"
_DESCRIPTION: Final = (
    "Talks to a running frontend: streams answers with reasoning and tool calls, and says how fast they came."
)
_PROMPT: Final = "> "
HELP: Final = """\
/reset   forget the conversation
/exit    leave (so does Ctrl-D)
/help    this
Ctrl-C ends an answer; anything else is a question.
"""

Ask = Callable[[Mapping[str, Any]], Generator[dict[str, Any], None, None]]


def main(argv: Sequence[str] | None = None) -> None:
    """Exit status: 0, 1 when a question of a pipe or the server could not be answered, 2 for a bad command line."""
    try:
        config = load(ChatConfig, prog=PROG, description=_DESCRIPTION, argv=argv).config
        model = config.model or only_model(models(config.url), config.url)
        failures = _converse(config.model_copy(update={"model": model}))
    except ConfigError as exc:
        exit_with(PROG, exc)
    except ChatFailed as exc:
        sys.stderr.write(f"{PROG}: {exc}\n")
        raise SystemExit(1) from exc
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader is gone; without this the interpreter complains at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    raise SystemExit(1 if failures else 0)


def _converse(config: ChatConfig) -> int:
    """Until the input ends. How many of the questions that came from a pipe were not answered."""
    is_terminal = sys.stdin.isatty()
    has_colors = is_terminal and sys.stdout.isatty() and not is_color_refused()
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    chat = Chat(
        config,
        lambda body: stream_chat(config.url, body),
        Screen(sys.stdout, has_colors=has_colors),
        Notices(sys.stderr, has_colors=has_colors),
    )
    if is_terminal:
        chat.notes.say(f"{config.model} at {config.url}; /help says what else there is")
    chat.run(_typed_lines() if is_terminal else sys.stdin)
    return 0 if is_terminal else chat.failures


def only_model(names: Sequence[str], url: str) -> str:
    """Raises ConfigError unless there is exactly one."""
    if len(names) == 1:
        return names[0]
    if not names:
        raise ConfigError(f"{url} serves no model yet; start a worker, or name the model with --model", field="model")
    raise ConfigError(f"{url} serves several models; choose one with --model: {', '.join(names)}", field="model")


class Notices:
    """Lines of this program, as opposed to the model's."""

    def __init__(self, out: TextIO, *, has_colors: bool) -> None:
        self._out = out
        self._around = ("\x1b[2m", "\x1b[0m") if has_colors else ("", "")

    def say(self, text: str) -> None:
        before, after = self._around
        self._out.write(f"{before}{text}{after}\n")
        self._out.flush()


class Chat:
    """A conversation: what was said so far, and what to do with a line."""

    def __init__(self, config: ChatConfig, ask: Ask, screen: Screen, notes: Notices) -> None:
        self._config = config
        self._ask = ask
        self._screen = screen
        self.notes = notes
        self.failures = 0
        self._messages: list[dict[str, str]] = []

    def run(self, lines: Iterable[str]) -> None:
        """Until the lines end or one says /exit."""
        for line in lines:
            text = line.strip()
            if text == "/exit":
                return
            if text.startswith("/"):
                self._command(text)
            elif text:
                self._turn(text)

    def request(self, question: str) -> dict[str, Any]:
        """The body for the next question."""
        config = self._config
        system = [] if config.system is None else [{"role": "system", "content": config.system}]
        chosen = {name: getattr(config, name) for name in ("reasoning_effort", "max_tokens", "temperature")}
        return {
            "model": config.model,
            "messages": [*system, *self._messages, {"role": "user", "content": question}],
            "stream": True,
            "stream_options": {"include_usage": True},
        } | {name: value for name, value in chosen.items() if value is not None}

    def _command(self, text: str) -> None:
        if text == "/reset":
            self._messages.clear()
            self.notes.say("forgotten")
        elif text == "/help":
            self.notes.say(HELP.rstrip())
        else:
            self.notes.say(f"{text.split()[0]} is no command; /help lists them")

    def _turn(self, question: str) -> None:
        turn = ChatTurn()
        try:
            with closing(self._ask(self.request(question))) as events:
                for event in events:
                    for piece in turn.add(event):
                        self._screen.show(piece)
            self._screen.end()
            self.notes.say(turn.report())
        except KeyboardInterrupt:
            self._screen.end()
            self.notes.say(f"stopped; {turn.report()}")
        except ChatFailed as exc:
            self._screen.end()
            self.notes.say(f"error: {exc}")
            self.failures += 1
            return
        self._messages.append({"role": "user", "content": question})
        if turn.content:
            self._messages.append({"role": "assistant", "content": turn.content})


def _typed_lines() -> Iterator[str]:
    """Lines from a person, up to Ctrl-D. Ctrl-C gives the line up."""
    with suppress(ImportError):
        import readline  # noqa: F401  # editing and history for `input`
    while True:
        try:
            yield input(_PROMPT)
        except KeyboardInterrupt:
            sys.stdout.write("\n")
        except EOFError:
            sys.stdout.write("\n")
            return
