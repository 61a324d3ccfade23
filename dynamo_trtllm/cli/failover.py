"""Show that a stream survives the loss of its decode worker (`dynamo-trtllm demo --failover`).

The same request is sent twice, with greedy sampling. The decode worker of the second stream gets
SIGKILL in the middle of the answer. Another worker continues the answer, and both texts must be
equal.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from dynamo_trtllm.cli.chat import error_text
from dynamo_trtllm.cli.explain import timeline
from dynamo_trtllm.config.flags import ENV_PREFIX
from dynamo_trtllm.config.load import process_environment
from dynamo_trtllm.config.parser import COMMAND_NAME
from dynamo_trtllm.launch.demonstration import (
    CHAT_PATH,
    Demonstration,
    ReadyDeployment,
    check_access,
    sample_request,
    until_model_is_ready,
)
from dynamo_trtllm.launch.process_output import ProcessOutput
from dynamo_trtllm.launch.process_specs import ProcessSpec
from dynamo_trtllm.observability.recorder import recorder_folder
from dynamo_trtllm.observability.recordings import Recordings, RequestRecording
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.protocol.sanitize import escape_controls
from dynamo_trtllm.support import http_client
from dynamo_trtllm.support.subprocesses import RunFailed

MAX_PAUSE_S: Final = 10.0  # a longer pause of the stream fails the demo
_KILL_AFTER: Final = 0.4  # share of the characters of the answer
_TIMEOUT_S: Final = 180.0  # the longest time for both streams
_RECORDED_WITHIN_S: Final = 2.0  # the longest wait for the recording of the end
_POLL_S: Final = 0.05  # between two looks at the recordings
_TICK_S: Final = 0.1  # between two counts of the pause on a terminal
_SHORTEST_PAUSE_S: Final = 0.1  # shorter gaps between two pieces of text are not shown
_MAX_TOKENS: Final = 400  # the most tokens of the answer
# More fields of the request, by model, for a long answer. The bundled model thinks longest with a
# high effort.
_FIELDS_FOR_LONG_ANSWERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "tiny-gpt-oss": {"reasoning_effort": "high"}
}
_RECORDER_DIR: Final = f"{ENV_PREFIX}RECORDER_DIR"
_DATA: Final = "data: "
_DONE: Final = "[DONE]"

_MAX_WIDTH: Final = 100  # columns
_INDENT: Final = "  "
_BOLD: Final = "1"
_RED: Final = "31"
_GREEN: Final = "32"
_CLEAR_LINE: Final = "\r\x1b[2K"


async def show_failover(deployment: ReadyDeployment) -> None:
    """Send both requests, kill a decode worker, and write what happens.

    Raises:
        RunFailed: a stream failed, the texts differ, or the pause was longer than `MAX_PAUSE_S`.
    """
    workers = deployment.names()
    screen = Screen(deployment.output)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await until_model_is_ready(
                deployment.frontend.url,
                deployment.model,
                deployment.api_key,
                deployment.tls_context(),
            )
            reference = await _undisturbed(deployment)
            name = workers.get(reference.last_worker, "a worker")
            screen.line("One stream, and kill -9 of the worker that generates it\n", _BOLD)
            screen.line(
                f"1  undisturbed: {len(reference.text):,} characters from {name} in"
                f" {reference.last_s - reference.began_s:.1f} s"
            )
            screen.line("2  the same request again:\n")
            answer = await _interrupted(deployment, reference, screen)
            request = await _recorded(answer.id)
    except OSError as exc:
        reason = str(exc) or f"it did not end within {_TIMEOUT_S:g} s"
        raise RunFailed(f"the stream failed: {reason}") from exc
    finally:
        screen.end_line()
    screen.line(f"\n$ {COMMAND_NAME} explain {answer.id}", _BOLD)
    screen.line("(nothing is recorded)" if request is None else timeline(request).rstrip())
    screen.line("")
    show_verdict(screen, reference, answer, workers)


def check(specs: Sequence[ProcessSpec]) -> None:
    """Raise ConfigError if the deployment has fewer than two decode workers, or denies access."""
    check_access(specs)
    num_workers = len([spec for spec in specs if spec.role is Role.DECODE])
    if num_workers < 2:
        raise ConfigError(
            f"--failover needs two decode workers, but the deployment has {num_workers}; add"
            " `count: 2` to its decode worker",
            field="failover",
        )


FAILOVER = Demonstration(show_failover, check, is_quiet=True)


@dataclass(eq=False)
class StreamedAnswer:
    """An answer, as far as it has arrived. Times are in seconds on one clock."""

    id: str = ""
    first_worker: str = ""  # instance id of the decode worker that has begun the answer
    last_worker: str = ""  # instance id of the decode worker that has ended the answer
    text: str = ""  # reasoning and content
    began_s: float = field(default_factory=time.perf_counter)
    last_s: float = 0.0  # when the last text arrived
    is_interrupted: bool = False  # its decode worker was killed
    longest_pause_s: float = 0.0  # the longest time between two pieces of text since then
    _has_content: bool = False

    def add(self, event: Mapping[str, Any]) -> str:
        """Add an event of the stream. Return its text."""
        self.id = event.get("id") or self.id
        statistics = event.get("dynamo_trtllm") or {}
        self.last_worker = statistics.get("decode_instance") or self.last_worker
        text = ""
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            content = delta.get("content") or ""
            if content and self.text and not self._has_content:
                text += "\n"  # after the reasoning
            self._has_content = self._has_content or bool(content)
            text += (delta.get("reasoning_content") or "") + content
        if text:
            if self.is_interrupted:
                self.longest_pause_s = max(self.longest_pause_s, self.silent_s())
            self.text += text
            self.last_s = time.perf_counter()
        return text

    def silent_s(self) -> float:
        """Return the seconds since the last text."""
        return time.perf_counter() - (self.last_s or self.began_s)


async def _events(
    deployment: ReadyDeployment, answer: StreamedAnswer
) -> AsyncGenerator[dict[str, Any], None]:
    """Send the request, and yield the events of its stream.

    Raises:
        OSError: the connection failed, or ended before the stream.
        RunFailed: the frontend answered with an error.
    """
    model = deployment.model
    body = sample_request(model) | {"stream": True, "max_tokens": _MAX_TOKENS}
    body |= _FIELDS_FOR_LONG_ANSWERS.get(model, {})
    headers = {"Content-Type": "application/json", "x-dynamo-stats": "1"}
    headers |= http_client.bearer(deployment.api_key)
    url = deployment.frontend.url + CHAT_PATH
    async with await http_client.connect(url, deployment.tls_context()) as connection:
        response = await connection.request("POST", json.dumps(body).encode(), headers)
        if response.status != HTTPStatus.OK:
            text = (await response.read()).decode(errors="replace")
            raise RunFailed(f"the frontend answered {response.status}: {text}")
        answer.first_worker = response.headers.get("x-decode-instance", "")
        async for line in response.lines():
            data = line.decode(errors="replace").strip()
            if not data.startswith(_DATA):
                continue
            data = data.removeprefix(_DATA)
            if data == _DONE:
                return
            event = json.loads(data)
            if "error" in event:
                raise RunFailed(f"the stream ended with an error: {error_text(event)}")
            yield event
    raise ConnectionError("the connection was closed before the end of the stream")


async def _undisturbed(deployment: ReadyDeployment) -> StreamedAnswer:
    """Return the answer to the request. No worker is killed meanwhile."""
    answer = StreamedAnswer()
    async with aclosing(_events(deployment, answer)) as events:
        async for event in events:
            answer.add(event)
    return answer


async def _interrupted(
    deployment: ReadyDeployment, reference: StreamedAnswer, screen: Screen
) -> StreamedAnswer:
    """Return the answer to the same request, whose decode worker is killed in the middle.

    Raises:
        OSError: the connection failed.
        RunFailed: the stream ended with an error, or before a worker was killed.
    """
    answer = StreamedAnswer()
    counter = asyncio.create_task(_count_pause(answer, screen), name="count of the pause")
    kill_at = _KILL_AFTER * len(reference.text)
    try:
        async with aclosing(_events(deployment, answer)) as events:
            async for event in events:
                silent_s = answer.silent_s()
                text = answer.add(event)
                if text and answer.is_interrupted and silent_s >= _SHORTEST_PAUSE_S:
                    screen.end_pause(silent_s)
                screen.text(text)
                if not answer.is_interrupted and len(answer.text) >= kill_at:
                    name, pid = _kill(deployment, answer.first_worker)
                    answer.is_interrupted = True
                    screen.begin_pause(f"kill -9 {pid}: {name}, which generates this, is gone")
    finally:
        counter.cancel()
        with suppress(asyncio.CancelledError):
            await counter
    screen.end_text()
    if not answer.is_interrupted:
        raise RunFailed("the answer ended before its decode worker was killed; run it again")
    return answer


async def _count_pause(answer: StreamedAnswer, screen: Screen) -> None:
    """Show the length of the pause while it lasts."""
    while True:
        await asyncio.sleep(_TICK_S)
        if answer.is_interrupted:
            screen.count_pause(answer.silent_s())


def _kill(deployment: ReadyDeployment, instance_id: str) -> tuple[str, int]:
    """Kill a worker. Return its name and process id. Raise RunFailed if there is no such worker."""
    for process in deployment.record.processes:
        if process.instance_id == instance_id:
            os.kill(process.pid, signal.SIGKILL)
            return process.name, process.pid
    raise RunFailed(f"no worker of this deployment is instance {instance_id!r}, which decodes")


async def _recorded(request_id: str) -> RequestRecording | None:
    """Return what the processes have recorded of an ended request; None if they record nothing."""
    environ = process_environment()
    folder = recorder_folder(environ.get(_RECORDER_DIR), environ)
    if folder is None:
        return None
    found: list[RequestRecording] = []
    # FileNotFoundError: there is no folder.
    with suppress(TimeoutError, FileNotFoundError):
        async with asyncio.timeout(_RECORDED_WITHIN_S):
            # The frontend records the end after it has sent the last event.
            while not found or found[0].finished is None:
                found = Recordings.read(folder).find(request_id)
                await asyncio.sleep(_POLL_S)
    return found[0] if found else None


def show_verdict(
    screen: Screen, reference: StreamedAnswer, answer: StreamedAnswer, workers: Mapping[str, str]
) -> None:
    """Write whether the stream has survived. Raise RunFailed if it has not.

    Args:
        screen: where to write.
        reference: the undisturbed answer.
        answer: the answer whose decode worker was killed.
        workers: names of the workers by instance id.
    """
    pause_s = answer.longest_pause_s
    length = f"{len(reference.text):,} characters"
    successor = workers.get(answer.last_worker, "another worker")
    if answer.text != reference.text:
        screen.line(f"✗ the text differs from that of the undisturbed run ({length})", _RED)
        raise RunFailed("the text differs from that of the undisturbed run")
    screen.line(f"✓ the same text as undisturbed: {length}, the rest from {successor}", _GREEN)
    if pause_s > MAX_PAUSE_S:
        screen.line(f"✗ the stream paused for {pause_s:.2f} s, once", _RED)
        raise RunFailed(f"the stream paused for more than {MAX_PAUSE_S:g} s")
    screen.line(f"✓ longest pause {pause_s:.2f} s", _GREEN)


def _terminal_columns() -> int:
    """Return the number of columns of the terminal; 100 if there is none.

    The output of this process may be relayed, so its input is asked, too.
    """
    with suppress(KeyError, ValueError):
        return int(process_environment()["COLUMNS"])
    for stream in (sys.__stdin__, sys.__stdout__):
        if stream is None:
            continue
        # ValueError: the stream is closed.
        with suppress(OSError, ValueError):
            return os.get_terminal_size(stream.fileno()).columns or _MAX_WIDTH
    return _MAX_WIDTH


class Screen:
    """Writes lines, and a text that streams, in at most 100 columns.

    Colors and the count of a pause need a terminal.
    """

    def __init__(self, output: ProcessOutput) -> None:
        self._output = output
        self._width = min(_terminal_columns(), _MAX_WIDTH)
        self._column = 0  # 0: at the beginning of a line
        self._word = ""  # the last word of the text, which is not written yet
        self._is_pausing = False
        self._has_count = False  # the line shows how long the pause is

    def line(self, text: str, style: str = "") -> None:
        """Write lines."""
        self._output.write(f"{self._styled(text, style)}\n")

    def text(self, text: str) -> None:
        """Write more of the text that streams, as far as its words are complete."""
        for character in text:
            if not character.isspace():
                self._word += escape_controls(character)
                continue
            self._end_word()
            if character == "\n":
                self.end_line()

    def end_text(self) -> None:
        """Write the rest of the text."""
        self._end_word()
        self.end_line()

    def end_line(self) -> None:
        """Begin a new line, unless the current line is empty."""
        if self._column:
            self._output.write("\n")
            self._column = 0

    def begin_pause(self, cause: str) -> None:
        """Write why the text pauses."""
        self.end_line()
        self.line(f"✗ {cause}", _RED)
        self._is_pausing = True

    def count_pause(self, pause_s: float) -> None:
        """Show on a terminal how long the pause is."""
        if self._is_pausing and self._output.has_terminal and pause_s >= _SHORTEST_PAUSE_S:
            if not self._has_count:
                self.end_line()
            self._output.write(f"{_CLEAR_LINE}… {pause_s:.1f} s")
            self._has_count = True
            self._column = 1

    def end_pause(self, pause_s: float) -> None:
        """Write that the text goes on, after its first pause."""
        if not self._is_pausing:
            return
        self._is_pausing = False
        if self._has_count:
            self._output.write(_CLEAR_LINE)
            self._column = 0
        self.end_line()
        self.line(f"✓ another decode worker goes on after {pause_s:.2f} s", _GREEN)

    def _end_word(self) -> None:
        if not self._word:
            return
        if self._column + 1 + len(self._word) > self._width:
            self.end_line()
        space = " " if self._column else _INDENT
        self._output.write(space + self._word)
        self._column += len(space) + len(self._word)
        self._word = ""

    def _styled(self, text: str, style: str) -> str:
        if not style or not self._output.has_colors:
            return text
        return f"\x1b[{style}m{text}\x1b[0m"
