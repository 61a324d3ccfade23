"""The terminal client without a terminal and without a server: what is shown, said, counted and
asked.
"""

from __future__ import annotations

import asyncio
import io
import signal
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from dynamo_trtllm.cli.chat import (
    HELP,
    Chat,
    ChatFailed,
    ChatTurn,
    LiveOutput,
    error_text,
    events,
    iterated,
    main,
    notice_writer,
    only_model,
)
from dynamo_trtllm.config.commands import ChatConfig
from dynamo_trtllm.config.load import is_color_disabled, load
from dynamo_trtllm.protocol.errors import ConfigError
from tests.kit.cases import each_case


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": None}


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": tokens}}


def called(name: str | None = None, arguments: str = "") -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return chunk(tool_calls=[{"index": 0, "function": function}])


ANSWER = [
    chunk(role="assistant", content=""),
    chunk(reasoning_content="Hm."),
    chunk(content="Fo"),
    chunk(content="ur."),
]
ENDING = [chunk("stop"), usage(4)]


class Server:
    """A server that answers each request with the next script, and stores the requests."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.requests: list[Mapping[str, Any]] = []
        self.closed = 0

    def __call__(self, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        self.requests.append(body)
        try:
            for event in self.scripts.pop(0):
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            self.closed += 1


class Talk:
    """A chat whose output and notes are stored."""

    def __init__(self, server: Server, *, has_colors: bool = False, **config: Any) -> None:
        self.out = io.StringIO()
        self.notes = io.StringIO()
        self.chat = Chat(
            ChatConfig(model="m", **config),
            server,
            LiveOutput(self.out, has_colors=has_colors),
            notice_writer(self.notes, has_colors=has_colors),
        )


def clock(*times: float) -> Callable[[], float]:
    left = iter(times)
    return lambda: next(left)


def test_run_distinguishes_parts_and_reports_the_turn() -> None:
    talk = Talk(Server([*ANSWER, *ENDING]))
    talk.chat.run(["2+2?\n"])
    assert talk.out.getvalue() == "[reasoning] Hm.\nFour.\n"
    assert talk.notes.getvalue().startswith("TTFT ")
    assert " ms, 4 tokens, " in talk.notes.getvalue()
    assert talk.notes.getvalue().endswith(" tokens/s\n")


def test_output_for_a_program_has_the_answer_only() -> None:
    out = io.StringIO()
    live_output = LiveOutput(out, has_colors=False, shows_reasoning=False)
    talk = Talk(Server([*ANSWER, *ENDING]))
    talk.chat.live_output = live_output
    talk.chat.run(["2+2?"])
    assert out.getvalue() == "Four.\n"


def test_run_with_colors_dims_only_reasoning() -> None:
    talk = Talk(Server([*ANSWER, *ENDING]), has_colors=True)
    talk.chat.run(["2+2?"])
    reasoning, _, content = talk.out.getvalue().partition("Hm.")
    assert reasoning.endswith("\x1b[2m")
    assert content.startswith("\x1b[0m\n")
    assert "\x1b[2m" not in content


def test_run_shows_tool_name_and_arguments_as_they_come() -> None:
    talk = Talk(
        Server(
            [
                called("f"),
                called(arguments='{"a":'),
                called(arguments=" 1}"),
                chunk("tool_calls"),
                usage(9),
            ]
        )
    )
    talk.chat.run(["?"])
    assert talk.out.getvalue() == '[tool call] f {"a": 1}\n'
    assert "finish reason: tool_calls" in talk.notes.getvalue()


def test_run_when_two_tools_are_called_then_each_has_its_line() -> None:
    talk = Talk(Server([called("f", "{}"), called("g", "[]"), chunk("tool_calls")]))
    talk.chat.run(["?"])
    assert talk.out.getvalue() == "[tool call] f {}\n[tool call] g []\n"


def test_run_sends_the_conversation_with_each_question() -> None:
    server = Server([*ANSWER, *ENDING], [chunk(content="Five.")], [chunk(content="x")])
    talk = Talk(server, system="Be brief.", reasoning_effort="low", max_tokens=9, temperature=0)
    talk.chat.run(["2+2?", "", "  2+3? ", "/reset", "again"])
    system = {"role": "system", "content": "Be brief."}
    first = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "Four."}]
    assert server.requests[1] == {
        "model": "m",
        "messages": [system, *first, {"role": "user", "content": "2+3?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "low",
        "max_tokens": 9,
        "temperature": 0,
    }
    assert server.requests[2]["messages"] == [system, {"role": "user", "content": "again"}]
    assert "Conversation cleared." in talk.notes.getvalue()


def test_run_without_choices_leaves_them_to_the_server() -> None:
    server = Server([])
    Talk(server).chat.run(["hi"])
    assert server.requests == [
        {
            "model": "m",
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_run_failed_answer_is_one_line_and_forgotten() -> None:
    server = Server([chunk(content="Fo"), ChatFailed("no worker")], [chunk(content="x")])
    talk = Talk(server)
    talk.chat.run(["a", "b"])
    assert talk.out.getvalue() == "Fo\nx\n"
    assert "error: no worker\n" in talk.notes.getvalue()
    assert talk.chat.num_failures == 1
    assert server.requests[1]["messages"] == [{"role": "user", "content": "b"}]


def test_run_interrupted_ends_only_the_answer() -> None:
    server = Server([chunk(content="Fo"), KeyboardInterrupt()], [chunk(content="x")])
    talk = Talk(server, has_colors=True)
    talk.chat.run(["a", "b"])
    assert "stopped; TTFT" in talk.notes.getvalue()
    assert server.closed == 2
    assert server.requests[1]["messages"][:2] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Fo"},
    ]
    assert talk.chat.num_failures == 0


async def endless_lines() -> AsyncIterator[bytes]:
    yield b"first"
    await asyncio.sleep(60)


def test_ctrl_c_between_two_lines_is_not_lost() -> None:
    """It comes in a callback of the garbage collector, in which exceptions are only printed."""
    lines = iterated(endless_lines())
    assert next(lines) == b"first"
    garbage = Server()
    reference = weakref.ref(garbage, lambda _: signal.raise_signal(signal.SIGINT))
    del garbage
    assert reference() is None
    with pytest.raises(KeyboardInterrupt):
        next(lines)


def test_ctrl_c_ends_the_wait_for_a_line() -> None:
    lines = iterated(endless_lines())
    next(lines)
    timer = threading.Timer(0.05, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(lines)
    timer.join()


@pytest.mark.parametrize(
    ("line", "said"),
    [("/help", HELP), ("/what now", "Unknown command /what. Type /help for commands.\n")],
    ids=str,
)
def test_run_when_a_line_is_a_command_then_nothing_is_asked(line: str, said: str) -> None:
    talk = Talk(Server())
    talk.chat.run([line])
    assert talk.notes.getvalue() == said


def test_run_when_exit_is_typed_then_no_line_is_read_after_it() -> None:
    def lines() -> Iterator[str]:
        yield "/exit"
        raise AssertionError("another line was read")

    Talk(Server()).chat.run(lines())


def test_show_keeps_control_characters_from_the_terminal() -> None:
    out = io.StringIO()
    live_output = LiveOutput(out, has_colors=False)
    live_output.show("content", "a\x1b[31mb\x07\r\x9bc\td\n")
    live_output.end()
    assert out.getvalue() == "a[31mbc\td\n"


def test_report_separates_first_and_following_tokens() -> None:
    turn = ChatTurn(clock=clock(10.0, 10.25, 10.75))
    for event in (chunk(content="a"), chunk(content="b"), *ENDING):
        list(turn.add(event))
    assert turn.report() == "TTFT 250 ms, 4 tokens, 6.0 tokens/s"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ([], "no text"),
        ([chunk("length"), usage(3)], "no text, 3 tokens, finish reason: length"),
        ([chunk(content="a"), usage(1)], "TTFT 0 ms, 1 token"),
        ([{"choices": None}, {"choices": [{"delta": None}]}], "no text"),
    ],
)
def test_report_when_little_came_then_it_says_so(
    script: list[dict[str, Any]], expected: str
) -> None:
    turn = ChatTurn(clock=lambda: 1.0)
    for event in script:
        list(turn.add(event))
    assert turn.report() == expected


def test_events_when_the_stream_ends_well_then_all_data_came() -> None:
    lines = [
        b'data: {"a": 1}\n',
        b"\n",
        b": comment\n",
        b'data:{"a": 2}\n',
        b"data: [DONE]\n",
        b"data: no\n",
    ]
    assert list(events(lines)) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([b'data: {"a": 1}\n'], "answer is incomplete"),
        ([b'data: {"error": {"message": "no\\nworker"}}\n'], "^no worker$"),
        ([b"data: {\n"], "not JSON"),
        ([b"data: 7\n"], "not a JSON object"),
    ],
)
def test_events_when_the_stream_breaks_then_it_is_one_line(
    lines: list[bytes], message: str
) -> None:
    with pytest.raises(ChatFailed, match=message) as caught:
        list(events(lines))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "body", [{"error": "bad"}, {"detail": "bad"}, {"error": {"message": "bad"}}]
)
def test_error_text_keeps_the_words_of_another_envelope(body: dict[str, Any]) -> None:
    assert "bad" in error_text(body)


def test_only_model_when_there_is_one_then_it_is_taken() -> None:
    assert only_model(["a"], "http://x") == "a"


@pytest.mark.parametrize(
    ("names", "message"), [([], "has no model yet"), (["a", "b"], "choose one .*: a, b")]
)
def test_only_model_without_a_choice_says_what_to_do(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        only_model(names, "http://x")


@each_case(
    "url",
    [
        *("x", "x:0", "ftp://x", "http://", "http://x:0", "http://x:99999", "http://[x"),
        *("http://x:1/?y=z", "x:1/#y", "http://x?"),
    ],
)
def test_url_that_is_no_server_address_is_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--url is .* expected an address like"):
        load(ChatConfig, prog="x", argv=["--url", url], environ={})


@pytest.mark.parametrize("typed", ["gpu-host:8000", "gpu-host:8000/v1", "http://gpu-host:8000/"])
def test_url_without_a_scheme_is_http(typed: str) -> None:
    config = load(ChatConfig, prog="x", argv=["--url", typed], environ={})
    assert config.url == "http://gpu-host:8000"


@pytest.mark.parametrize(
    "url", ["http://x:8000", "http://x:8000/", "http://x:8000/v1", "http://x:8000/v1/"]
)
def test_url_when_it_is_the_base_of_an_sdk_then_it_is_taken_too(url: str) -> None:
    assert ChatConfig(url=url).url == "http://x:8000"


class Refuses(BaseHTTPRequestHandler):
    """A handler that rejects the first request with control characters in the error."""

    credentials = ""

    def do_GET(self) -> None:
        Refuses.credentials = self.headers["Authorization"]
        self.send_response(403)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "no \\u001b[2J"}}')

    def log_message(self, *_: object) -> None:
        """Write no log."""


def test_main_sends_but_never_shows_the_address_password(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(SystemExit):
            main(["--url", f"http://user:s%20t@127.0.0.1:{server.server_port}"])
        thread.join()
    assert Refuses.credentials == "Basic dXNlcjpzIHQ="
    assert (
        f"http://***@127.0.0.1:{server.server_port} answered 403: no \\x1b[2J; set "
        in capsys.readouterr().err
    )


def test_notice_when_it_has_text_of_a_server_then_it_is_escaped() -> None:
    out = io.StringIO()
    notice_writer(out, has_colors=False)("a\x1b[2J\nb")
    assert out.getvalue() == "a\\x1b[2J\nb\n"


@pytest.mark.parametrize(
    "argv", [["--temperature", "3"], ["--max-tokens", "0"], ["--reasoning-effort", "huge"]]
)
def test_main_with_wrong_flag_exits_with_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert argv[0] in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("value", "refused"), [(None, False), ("", False), ("1", True), ("0", True)]
)
def test_is_color_refused_when_no_color_is_set_then_by_any_text(
    monkeypatch: pytest.MonkeyPatch, value: str | None, refused: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if value is not None:
        monkeypatch.setenv("NO_COLOR", value)
    assert is_color_disabled() is refused
