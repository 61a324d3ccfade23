"""Log lines: what is on them, and that no value which a client or a peer sent can forge one."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator

import pytest

from dynamo_trtllm.observability.logging import (
    LINE_CHARS,
    VALUE_CHARS,
    log_thread_stacks,
    request_id,
    setup,
)

FORGED = (
    "a\n2026-01-01T00:00:00.000Z ERROR frontend - root:"
    " FORGED\r\x1b[31m\x85\u2028\u2029\u202e\u2066\ud800\x7f"
)
_UNSAFE = re.compile("[^\n\x20-\x7e\xa1-\u200a\u2010-\u2027]")
_HEAD = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (\w+ .+: .*)")

log = logging.getLogger("dynamo_trtllm.x")


@pytest.fixture
def logged(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """What was logged, as a function; the root logger is put back afterwards."""
    root = logging.getLogger()
    before = list(root.handlers)
    level = root.level
    yield lambda: capsys.readouterr().err
    logging.captureWarnings(False)
    logging.getLogger("dynamo_trtllm").setLevel(logging.NOTSET)
    root.handlers[:] = before
    root.setLevel(level)


def heads(text: str) -> list[str]:
    """Of each record without its time; other lines than those of tracebacks are none."""
    lines = text.split("\n")
    assert lines.pop() == ""
    found = [_HEAD.fullmatch(line) for line in lines if not line.startswith("  ")]
    return [match.group(1) if match else "" for match in found]


def fail(error: Exception) -> None:
    try:
        raise error
    except Exception:
        log.exception("request %s failed", "r")


def test_setup_puts_request_id_and_process_on_the_line(logged: Callable[[], str]) -> None:
    setup("info", "prefill-1")
    token = request_id.set("req-7")
    log.info("call %d of %s in %.1f s", 1, "w", 0.25)
    request_id.reset(token)
    log.info("100%% idle")  # without arguments it is no template
    log.info("%(name)s", {"name": "by name"})
    assert heads(logged()) == [
        "INFO prefill-1 req-7 x: call 1 of w in 0.2 s",
        "INFO prefill-1 x: 100%% idle",
        "INFO prefill-1 x: by name",
    ]


def test_setup_twice_logs_once_at_the_new_level(logged: Callable[[], str]) -> None:
    setup("debug", "a")
    setup("warning", "b")
    log.info("hidden")
    log.warning("seen")
    assert heads(logged()) == ["WARNING b x: seen"]


def test_setup_at_info_shows_other_packages_from_warning(logged: Callable[[], str]) -> None:
    setup("info", "a")
    logging.getLogger("nats").info("hidden")
    logging.getLogger("nats").warning("seen\n")
    assert heads(logged()) == ["WARNING a nats: seen"]


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize(
    "write",
    [
        lambda: log.info("param=%s", FORGED),
        lambda: log.info("param=%r of %s", FORGED, {"key": FORGED}),
        lambda: log.info(FORGED),
        lambda: logging.getLogger(FORGED).warning("text"),
        lambda: log.info("%s", ValueError(FORGED)),
        lambda: fail(ValueError(FORGED)),
        lambda: fail(ExceptionGroup(FORGED, [KeyError(FORGED), ValueError(FORGED)])),
    ],
    ids=["value", "repr", "message", "logger", "exception", "traceback", "group"],
)
def test_line_escapes_control_characters(
    logged: Callable[[], str], log_format: str, write: Callable[[], None]
) -> None:
    # pytest's own: a report of a test can't hold a lone surrogate
    logging.getLogger().handlers.clear()
    setup("info", "a", log_format)
    token = request_id.set(FORGED)
    write()
    request_id.reset(token)
    text = logged()
    assert not _UNSAFE.search(text)
    if log_format == "text":
        (head,) = heads(text)
        assert head
    else:
        (line,) = text.splitlines()
        assert isinstance(json.loads(line), dict)


def test_line_shortens_the_middle_of_long_values(logged: Callable[[], str]) -> None:
    setup("info", "a")
    log.info("%s", "x" * 1_000_000 + "end")
    token = request_id.set("i" * 1_000_000)
    log.info("%s" * 9, *["\n" * 2_000] * 9)
    request_id.reset(token)
    fail(ValueError("y" * 1_000_000))
    first, second, *rest = logged().splitlines()
    assert len(first) < VALUE_CHARS + 100
    assert first.endswith("xend")
    assert len(second) < 2 * LINE_CHARS + 500  # escaped
    assert max(map(len, rest)) < LINE_CHARS + 100


def test_deep_traceback_loses_its_middle(logged: Callable[[], str]) -> None:
    def down(left: int, other: Callable[..., None]) -> None:
        if left:
            other(left - 1, down)
        raise ValueError("deepest")

    def across(left: int, other: Callable[..., None]) -> None:
        other(left, across)

    setup("info", "a")
    error = ValueError("bad value")
    error.add_note("a note\n2026-01-01T00:00:00.000Z ERROR a - root: FORGED")
    fail(error)
    head, first, *frame, last, note, more = logged().splitlines()
    assert head.endswith("request r failed")
    assert first == "  Traceback (most recent call last):"
    assert [line.strip() for line in frame][1:] == ["raise error"]
    assert (last, note) == ("  ValueError: bad value", "  a note")
    assert more.startswith("  2026")
    try:
        down(300, across)
    except ValueError:
        log.exception("failed")
    assert len(logged().splitlines()) < 210


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_stacks_log_each_thread_with_its_name(logged: Callable[[], str], log_format: str) -> None:
    def wait_here() -> None:
        is_waiting.set()
        go_on.wait()

    setup("error", "a", log_format)
    is_waiting = threading.Event()
    go_on = threading.Event()
    thread = threading.Thread(target=wait_here, name="waits-here")
    thread.start()
    is_waiting.wait()
    log_thread_stacks(log)
    go_on.set()
    thread.join()
    text = logged()
    assert "stack of thread MainThread" in text
    assert "stack of thread waits-here" in text
    assert "in wait_here" in text
    if log_format == "json":
        assert all(isinstance(json.loads(line), dict) for line in text.splitlines())


def test_json_line_has_all_fields(logged: Callable[[], str]) -> None:
    setup("info", "decode", "json")
    token = request_id.set("req-7")
    fail(ValueError("bad"))
    request_id.reset(token)
    log.warning("caf\u00e9 %s", "a\nb")
    failed, plain = map(json.loads, logged().splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", failed.pop("time"))
    lines = failed.pop("exception").split("\n")
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "ValueError: bad")
    common = {"process": "decode", "logger": "dynamo_trtllm.x"}
    assert failed == common | {
        "level": "error",
        "message": "request r failed",
        "request_id": "req-7",
    }
    del plain["time"]
    assert plain == common | {
        "level": "warning",
        "message": "caf\u00e9 a\nb",
        "request_id": None,
        "exception": None,
    }
