"""Chat with a running frontend (`python -m dynamo_trtllm.chat`).

The questions come from the command line, from a terminal, or line by line from a pipe.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
import ssl
import sys
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TextIO, TypeAlias

from dynamo_trtllm.config.commands import ChatConfig
from dynamo_trtllm.config.flags import ENV_PREFIX
from dynamo_trtllm.config.load import command, is_color_disabled
from dynamo_trtllm.launch.running_deployments import frontend_here
from dynamo_trtllm.protocol.counted import counted
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.sanitize import escape_controls, mask_address
from dynamo_trtllm.support import http_client
from dynamo_trtllm.support.tls import client_context, own_server_context

_PROMPT: Final = "> "
HELP: Final = """\
/reset   clear the conversation
/exit    exit (also Ctrl-D)
/help    show this help
Ctrl-C stops an answer. Any other line is sent as a question.
"""

Ask = Callable[[Mapping[str, Any]], Generator[dict[str, Any], None, None]]
_DONE: Final = "[DONE]"
_DATA: Final = "data:"
_AUTHENTICATION_HINT: Final = (
    f"set {ENV_PREFIX}API_KEY to an API key, or pass --tls-client-cert-file and"
    " --tls-client-key-file"
)


class ChatFailed(Exception):
    """The answer is missing or incomplete.

    The message is one line, with advice where there is any.
    """


@command(ChatConfig, "python -m dynamo_trtllm.chat", ChatFailed)
def main(config: ChatConfig) -> int:
    """Run the command.

    Exit with status 0, with 1 if the server is unreachable or a question from a pipe got no answer,
    and with 2 for a bad command line.
    """
    server = ChatServer.of(config)
    model = config.model or only_model(models(server), server.url)
    num_failures = _converse(config.model_copy(update={"model": model}), server)
    return 1 if num_failures else 0


class ChatServer(NamedTuple):
    """A frontend, and how this client proves to it who it is."""

    url: str
    api_key: str | None = None
    tls: ssl.SSLContext | None = None  # None: the default of `http_client.connect`

    @classmethod
    def of(cls, config: ChatConfig) -> ChatServer:
        """Return the frontend that the settings mean.

        Raises:
            ConfigError: several deployments run here, or the client certificate can't be used.
        """
        url = config.url
        certificate = ""
        if url is None:
            url, certificate = frontend_here(config.deployment_name)
        if certificate:
            tls: ssl.SSLContext | None = own_server_context(
                Path(certificate), config.client_tls_files
            )
        else:
            tls = client_context(url, config.client_tls_files)
        return cls(url, config.api_key, tls)


def _converse(config: ChatConfig, server: ChatServer) -> int:
    """Chat until the input ends.

    Return how many questions failed; 0 if the questions come from a terminal.
    """
    reads_terminal = sys.stdin.isatty()
    writes_terminal = sys.stdout.isatty()
    has_colors = reads_terminal and writes_terminal and not is_color_disabled()
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    chat = Chat(
        config,
        partial(stream_chat, server),
        LiveOutput(sys.stdout, has_colors=has_colors, shows_reasoning=writes_terminal),
        notice_writer(sys.stderr, has_colors=has_colors),
    )
    if config.question is not None:
        chat.run([config.question])
        return chat.num_failures
    if not reads_terminal:
        chat.run(sys.stdin)
        return chat.num_failures
    address = mask_address(server.url)
    chat.say(f"Connected to {config.model} at {address}. Type /help for commands.")
    chat.run(_typed_lines())
    return 0


def only_model(names: Sequence[str], url: str) -> str:
    """Return the only model name. Raise ConfigError if there is none or more than one."""
    if len(names) == 1:
        return names[0]
    if not names:
        raise ConfigError(f"{mask_address(url)} has no model yet; start a worker, or pass --model")
    raise ConfigError(
        f"{mask_address(url)} has several models; choose one with --model: {', '.join(names)}"
    )


def notice_writer(out: TextIO, *, has_colors: bool) -> Callable[[str], None]:
    """Return a function that writes a line of this program.

    With colors the line is dimmed, to differ from the model's output.
    """

    def say(text: str) -> None:
        # A part of the text may come from a server, so control characters are escaped.
        shown = "\n".join(map(escape_controls, text.split("\n")))
        if has_colors:
            shown = f"{_DIM}{shown}{_PLAIN}"
        out.write(f"{shown}\n")
        out.flush()

    return say


@dataclass(eq=False)
class Chat:
    """A conversation: its messages so far, and the handling of input lines."""

    config: ChatConfig
    ask: Ask
    live_output: LiveOutput
    say: Callable[[str], None]
    num_failures: int = 0  # questions that failed
    messages: list[dict[str, str]] = field(default_factory=list)

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
        config = self.config
        messages = [*self.messages, {"role": "user", "content": question}]
        if config.system is not None:
            messages.insert(0, {"role": "system", "content": config.system})
        body: dict[str, Any] = {
            "model": config.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for name in ("reasoning_effort", "max_tokens", "temperature"):
            value = getattr(config, name)
            if value is not None:
                body[name] = value
        return body

    def _command(self, text: str) -> None:
        if text == "/reset":
            self.messages.clear()
            self.say("Conversation cleared.")
        elif text == "/help":
            self.say(HELP.rstrip())
        else:
            self.say(f"Unknown command {text.split()[0]}. Type /help for commands.")

    def _turn(self, question: str) -> None:
        turn = ChatTurn()
        try:
            with closing(self.ask(self.request(question))) as events:
                for event in events:
                    for kind, text in turn.add(event):
                        self.live_output.show(kind, text)
            self.live_output.end()
            self.say(turn.report())
        except KeyboardInterrupt:
            self.live_output.end()
            self.say(f"stopped; {turn.report()}")
        except ChatFailed as exc:
            self.live_output.end()
            self.say(f"error: {exc}")
            self.num_failures += 1
            return
        self.messages.append({"role": "user", "content": question})
        if turn.content:
            self.messages.append({"role": "assistant", "content": turn.content})


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


def models(server: ChatServer) -> list[str]:
    """Return the names of the frontend's models. Raise ChatFailed if it gives no valid answer."""
    with closing(iterated(_response_lines(server, "/v1/models"))) as lines:
        body = _json(b"\n".join(lines))
    return [str(model.get("id")) for model in body.get("data") or ()]


def stream_chat(
    server: ChatServer, body: Mapping[str, Any]
) -> Generator[dict[str, Any], None, None]:
    """Send a chat completion request and yield the events of its stream.

    Close the generator to stop the answer.

    Args:
        server: the frontend.
        body: request body, with `stream` set.

    Raises:
        ChatFailed: there is no connection, the server returns an error, or the stream breaks.
    """
    content = json.dumps(body).encode()
    response = _response_lines(server, "/v1/chat/completions", content)
    with closing(iterated(response)) as lines:
        yield from events(lines)


def events(lines: Iterable[bytes]) -> Generator[dict[str, Any], None, None]:
    """Yield the server-sent events before `[DONE]`.

    Raise ChatFailed for an error event or a missing `[DONE]`.
    """
    for line in lines:
        text = line.decode(errors="replace").strip()
        if not text.startswith(_DATA):
            continue
        data = text.removeprefix(_DATA).strip()
        if data == _DONE:
            return
        event = _json(data)
        if event.get("error"):
            raise ChatFailed(error_text(event))
        yield event
    raise ChatFailed("the answer is incomplete: the server closed the connection")


def error_text(body: Mapping[str, Any]) -> str:
    """Return the message of an OpenAI error object as one line."""
    error = body.get("error")
    message = error.get("message") if isinstance(error, Mapping) else None
    return " ".join(str(message or body).split())


async def _response_lines(
    server: ChatServer, path: str, content: bytes | None = None
) -> AsyncGenerator[bytes, None]:
    """Send a request, and yield the lines of the response.

    It is a GET request, or a POST request if there is JSON content.

    Raises:
        ChatFailed: there is no connection, it is lost, or the status is not 200.
    """
    shown = mask_address(server.url)
    try:
        connection = await http_client.connect(server.url + path, server.tls)
    except OSError as exc:
        raise ChatFailed(
            f"no frontend answers at {shown} ({_reason(exc)}); start one, or give its address"
            " with --url"
        ) from exc
    try:
        async with connection:
            headers = http_client.bearer(server.api_key)
            if content is None:
                response = await connection.request("GET", headers=headers)
            else:
                headers["Content-Type"] = "application/json"
                response = await connection.request("POST", content, headers)
            if response.status != HTTPStatus.OK:
                text = (await response.read()).decode(errors="replace")
                advice = ""
                if response.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                    advice = f"; {_AUTHENTICATION_HINT}"
                raise ChatFailed(f"{shown} answered {response.status}: {_error_of(text)}{advice}")
            async for line in response.lines():
                yield line
    except OSError as exc:
        raise ChatFailed(f"connection to {shown} lost: {_reason(exc)}") from exc


def iterated(lines: AsyncIterator[bytes]) -> Generator[bytes, None, None]:
    """Yield lines as they arrive.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed, also while the caller handled a line.
    """
    interrupt = _Interrupt()
    # The end of the runner also ends the generator of the lines, which closes the connection.
    with asyncio.Runner() as runner:
        # Python's own handler raises wherever the main thread is. In a callback of the garbage
        # collector, the exception is only printed, and Ctrl-C has no effect.
        runner.get_loop().add_signal_handler(signal.SIGINT, interrupt.set)
        while True:
            line = runner.run(interrupt.unless_set(lines))
            if interrupt.is_set:
                raise KeyboardInterrupt
            if line is None:
                return
            yield line


class _Interrupt:
    """Whether Ctrl-C was pressed. `set` is the handler of the signal in an event loop."""

    def __init__(self) -> None:
        self.is_set = False
        self._waiting: asyncio.Task[Any] | None = None

    def set(self) -> None:
        """Note that Ctrl-C was pressed, and end a wait."""
        self.is_set = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def unless_set(self, lines: AsyncIterator[bytes]) -> bytes | None:
        """Return the next line. None: there is none, or Ctrl-C was pressed during the wait."""
        self._waiting = asyncio.current_task()
        try:
            return await anext(lines, None)
        except asyncio.CancelledError:
            return None
        finally:
            self._waiting = None


def _error_of(text: str) -> str:
    """Return the message in the body of an error as one line."""
    try:
        return error_text(_json(text))
    except ChatFailed:
        return " ".join(text.split())[:200]


def _json(data: bytes | str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as exc:
        raise ChatFailed(
            "the server's answer is not JSON; check that --url is the address of a frontend"
        ) from exc
    if not isinstance(value, dict):
        raise ChatFailed(
            "the server's answer is not a JSON object; check that --url is the address of a"
            " frontend"
        )
    return value


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# Characters that may move the cursor or change colors.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DIM: Final = "\x1b[2m"
_BOLD: Final = "\x1b[1m"
_PLAIN: Final = "\x1b[0m"

Kind: TypeAlias = Literal["reasoning", "content", "call", "arguments"]
"""Kind of a text in an answer. "call": the name of a tool; "arguments": its arguments."""
Delta: TypeAlias = tuple[Kind, str]


@dataclass(slots=True)
class ChatTurn:
    """The answer received so far.

    Times are measured in this process, so TTFT includes the network.
    """

    clock: Callable[[], float] = time.perf_counter
    content: str = ""
    finish: str | None = None
    # Output tokens as reported by the server, reasoning included.
    num_tokens: int | None = None
    began_s: float = field(init=False)
    first_s: float | None = None  # when the first text arrived
    last_s: float = 0.0  # when the last text arrived

    def __post_init__(self) -> None:
        self.began_s = self.clock()

    def add(self, event: Mapping[str, Any]) -> Iterator[Delta]:
        """Yield the deltas of a `chat.completion.chunk`."""
        usage = event.get("usage")
        if usage:
            self.num_tokens = usage.get("completion_tokens")
        for choice in event.get("choices") or ():
            self.finish = choice.get("finish_reason") or self.finish
            for kind, text in _deltas(choice.get("delta") or {}):
                self.last_s = self.clock()
                if self.first_s is None:
                    self.first_s = self.last_s
                if kind == "content":
                    self.content += text
                yield kind, text

    def report(self) -> str:
        """Return one line with TTFT, tokens, speed, and the finish reason if it is not `stop`."""
        words = []
        seconds = 0.0  # between the first and the last text
        if self.first_s is None:
            words.append("no text")
        else:
            words.append(f"TTFT {(self.first_s - self.began_s) * 1e3:.0f} ms")
            seconds = self.last_s - self.first_s
        if self.num_tokens is not None:
            words.append(counted(self.num_tokens, "token"))
            # The time begins with the first token, so this token is not counted.
            if self.num_tokens > 1 and seconds > 0:
                words.append(f"{(self.num_tokens - 1) / seconds:.1f} tokens/s")
        if self.finish not in (None, "stop"):
            words.append(f"finish reason: {self.finish}")
        return ", ".join(words)


def _deltas(delta: Mapping[str, Any]) -> Iterator[Delta]:
    parts: list[tuple[Kind, Any]] = [
        ("reasoning", delta.get("reasoning_content")),
        ("content", delta.get("content")),
    ]
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        parts.append(("call", function.get("name")))
        parts.append(("arguments", function.get("arguments")))
    for kind, text in parts:
        if text:
            yield kind, text


class LiveOutput:
    """Prints an answer while it streams.

    Each part begins a line; reasoning is dim, or labeled without colors. A program that reads the
    answer gets no reasoning.
    """

    def __init__(self, out: TextIO, *, has_colors: bool, shows_reasoning: bool = True) -> None:
        self._out = out
        self._has_colors = has_colors
        self._shows_reasoning = shows_reasoning
        self._kind: Kind | None = None
        self._is_at_line_start = True

    def show(self, kind: Kind, text: str) -> None:
        """Print one delta, without control characters."""
        if kind == "reasoning" and not self._shows_reasoning:
            return
        if kind != self._kind:
            self._begin(kind)
        self._write(_CONTROL.sub("", text))
        if kind == "call":
            self._write(" ")

    def end(self) -> None:
        """Reset colors and end the line, after the last delta or an interrupted answer."""
        self._style("")
        if not self._is_at_line_start:
            self._write("\n")
        self._kind = None

    def _begin(self, kind: Kind) -> None:
        # The arguments of a tool stand on the line of its name.
        if (self._kind, kind) != ("call", "arguments"):
            self.end()
        self._kind = kind
        if kind == "reasoning":
            self._style(_DIM)
            self._write("" if self._has_colors else "[reasoning] ")
        elif kind == "call":
            self._style(_BOLD)
            self._write("[tool call] ")

    def _style(self, style: str) -> None:
        if self._has_colors:
            self._out.write(_PLAIN + style)

    def _write(self, text: str) -> None:
        if text:
            self._out.write(text)
            self._is_at_line_start = text.endswith("\n")
            self._out.flush()
