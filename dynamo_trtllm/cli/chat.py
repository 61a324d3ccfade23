"""Chat with a running frontend (`python -m dynamo_trtllm.chat`), in a terminal or line by line from a pipe."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Final, TextIO

from dynamo_trtllm.cli.chat_turn import ChatFailed, ChatTurn, Screen, models, stream_chat
from dynamo_trtllm.config.commands import ChatConfig
from dynamo_trtllm.config.load import command_errors, is_color_disabled, load
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.sanitize import escape_controls, mask_address

PROG: Final = "python -m dynamo_trtllm.chat"
_DESCRIPTION: Final = (
    "Chat with a running frontend: stream answers with reasoning and tool calls, and print TTFT and speed."
)
_PROMPT: Final = "> "
HELP: Final = """\
/reset   clear the conversation
/exit    exit (also Ctrl-D)
/help    show this help
Ctrl-C stops an answer. Any other line is sent as a question.
"""

Ask = Callable[[Mapping[str, Any]], Generator[dict[str, Any], None, None]]


@command_errors(PROG, ChatFailed)
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Exit with status 0, with 1 if the server is unreachable or a question from a pipe got no answer, and with 2 for a
    bad command line.
    """
    config = load(ChatConfig, prog=PROG, description=_DESCRIPTION, argv=argv)
    model = config.model or only_model(models(config.url), config.url)
    raise SystemExit(1 if _converse(config.model_copy(update={"model": model})) else 0)


def _converse(config: ChatConfig) -> int:
    """Chat until the input ends; return how many questions from a pipe failed."""
    is_terminal = sys.stdin.isatty()
    has_colors = is_terminal and sys.stdout.isatty() and not is_color_disabled()
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    chat = Chat(
        config,
        lambda body: stream_chat(config.url, body),
        Screen(sys.stdout, has_colors=has_colors),
        notice_writer(sys.stderr, has_colors=has_colors),
    )
    if is_terminal:
        chat.say(f"Connected to {config.model} at {mask_address(config.url)}. Type /help for commands.")
    chat.run(_typed_lines() if is_terminal else sys.stdin)
    return 0 if is_terminal else chat.failures


def only_model(names: Sequence[str], url: str) -> str:
    """Return the only model name. Raise ConfigError if there is none or more than one."""
    if len(names) == 1:
        return names[0]
    if not names:
        raise ConfigError(f"{mask_address(url)} has no model yet; start a worker, or pass --model", field="model")
    raise ConfigError(
        f"{mask_address(url)} has several models; choose one with --model: {', '.join(names)}", field="model"
    )


def notice_writer(out: TextIO, *, has_colors: bool) -> Callable[[str], None]:
    """Return a function that writes a line of this program, dimmed to differ from the model's output."""
    before, after = ("\x1b[2m", "\x1b[0m") if has_colors else ("", "")

    def say(text: str) -> None:
        shown = "\n".join(map(escape_controls, text.split("\n")))  # a server may have written a part of it
        out.write(f"{before}{shown}{after}\n")
        out.flush()

    return say


class Chat:
    """A conversation: its messages so far, and the handling of input lines."""

    def __init__(self, config: ChatConfig, ask: Ask, screen: Screen, say: Callable[[str], None]) -> None:
        self._config = config
        self._ask = ask
        self._screen = screen
        self.say = say
        self.failures = 0
        self._messages: list[dict[str, str]] = []

    def run(self, lines: Iterable[str]) -> None:
        """Process lines until they end or one is /exit."""
        for line in lines:
            text = line.strip()
            if text == "/exit":
                return
            if text.startswith("/"):
                self._command(text)
            elif text:
                self._turn(text)

    def request(self, question: str) -> dict[str, Any]:
        """Return the request body for the next question."""
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
            self.say("Conversation cleared.")
        elif text == "/help":
            self.say(HELP.rstrip())
        else:
            self.say(f"Unknown command {text.split()[0]}. Type /help for commands.")

    def _turn(self, question: str) -> None:
        turn = ChatTurn()
        try:
            with closing(self._ask(self.request(question))) as events:
                for event in events:
                    for delta in turn.add(event):
                        self._screen.show(delta)
            self._screen.end()
            self.say(turn.report())
        except KeyboardInterrupt:
            self._screen.end()
            self.say(f"stopped; {turn.report()}")
        except ChatFailed as exc:
            self._screen.end()
            self.say(f"error: {exc}")
            self.failures += 1
            return
        self._messages.append({"role": "user", "content": question})
        if turn.content:
            self._messages.append({"role": "assistant", "content": turn.content})


def _typed_lines() -> Iterator[str]:
    """Yield lines from the terminal until Ctrl-D. Ctrl-C discards the current line."""
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
