"""Record `dynamo-trtllm demo --failover` in a terminal, and draw the recording as a moving SVG.

    ./scripts/uv run --no-project --with pyte==0.8.2 python -m scripts.record_failover
    ./scripts/uv run --no-project --with pyte==0.8.2 python -m scripts.record_failover --draw

The first command records and draws, the second draws again. The recording is an asciicast
(version 2), which asciinema plays. pyte, a terminal emulator, turns it into screens. Tools that
do all of this, termtosvg and svg-term, are no longer maintained.

The picture plays the start of the processes eight times as fast, the stream as it happened, and
waits before the explanation, so that people can read. It shows the last screen where animations are
off.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import json
import os
import pty
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CAST = ROOT / "benchmarks" / "results" / "failover-demo.cast"
PICTURE = ROOT / "docs" / "images" / "failover-demo.svg"
COMMAND = "dynamo-trtllm demo --failover"
COLUMNS = 100
ROWS = 27

# Texts with which the parts of the output begin. What comes before them is the start of the
# processes.
_STREAM_BEGINS = "One stream"
_EXPLANATION_BEGINS = "$ dynamo-trtllm explain"
_START_SPEED = 8.0  # how many times as fast the start is played
_WAIT_S = 3.0  # before the explanation
_FRAME_S = 0.08  # the least time between two screens
_LAST_SCREEN_S = 9.0  # how long the last screen is shown, before the picture begins again
_FONT_PX = 13
_COLUMN_PX = 7.9
_LINE_PX = 17
_BAR_PX = 30
_MARGIN_PX = 14
_BACKGROUND = "#0d1117"
_BAR = "#161b22"
_TEXT = "#e6edf3"
_DIM = "#9198a1"
_FONT = 'ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace'
_COLORS = {"red": "#ff7b72", "green": "#7ee787", "brown": "#d29922", "cyan": "#76e3ea"}


class Run(NamedTuple):
    """A part of a line that has one color."""

    text: str
    color: str
    is_bold: bool


Line = tuple[Run, ...]


class Frame(NamedTuple):
    """A screen, and when it appears."""

    seconds: float
    lines: tuple[Line, ...]


def record() -> None:
    """Run the command in a terminal, and write what it prints as an asciicast.

    Raises:
        SystemExit: the command failed.
    """
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    program, *words = COMMAND.split()
    process = subprocess.Popen(
        [ROOT / ".venv" / "bin" / program, *words, "--port", "0"],
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        env=os.environ | {"TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(secondary)
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "timestamp": int(time.time())}
    header |= {"title": COMMAND}
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    began = time.monotonic()
    with CAST.open("w", encoding="utf-8") as cast:
        cast.write(json.dumps(header) + "\n")
        while True:
            try:
                data = os.read(primary, 1 << 16)
            except OSError:  # the command has ended
                break
            if not data:
                break
            after_s = round(time.monotonic() - began, 4)
            cast.write(json.dumps([after_s, "o", decoder.decode(data)]) + "\n")
    status = process.wait()
    if status:
        raise SystemExit(f"record_failover: {COMMAND} exited with status {status}")


def events() -> list[tuple[float, str]]:
    """Return the texts of the recording, and the seconds at which the picture shows them."""
    lines = CAST.read_text(encoding="utf-8").splitlines()[1:]
    printed = [(seconds, text) for seconds, _, text in map(json.loads, lines)]
    starts_s = next(seconds for seconds, text in printed if _STREAM_BEGINS in text)
    shown = []
    wait_s = 0.0
    for seconds, text in printed:
        if _EXPLANATION_BEGINS in text:
            wait_s = _WAIT_S
        start_s = min(seconds, starts_s) / _START_SPEED
        shown.append((start_s + max(0.0, seconds - starts_s) + wait_s, text))
    return shown


def frames() -> Iterator[Frame]:
    """Yield the screens of the recording."""
    import pyte

    screen = pyte.Screen(COLUMNS, ROWS)
    terminal = pyte.Stream(screen)
    shown = events()
    for number, (seconds, text) in enumerate(shown):
        terminal.feed(text)
        is_last = number + 1 == len(shown)
        if is_last or int(shown[number + 1][0] / _FRAME_S) > int(seconds / _FRAME_S):
            yield Frame(seconds, tuple(_line(screen.buffer[row]) for row in range(ROWS)))


def _line(cells: object) -> Line:
    row = [cells[column] for column in range(COLUMNS)]  # type: ignore[index]
    runs = []
    for (color, is_bold), group in groupby(row, key=lambda cell: (cell.fg, cell.bold)):
        runs.append(Run("".join(cell.data for cell in group), color, is_bold))
    while runs and not runs[-1].text.strip():
        runs.pop()
    if runs:
        runs[-1] = runs[-1]._replace(text=runs[-1].text.rstrip())
    return tuple(runs)


class Shown(NamedTuple):
    """A line on one row of the screen, and from when until when it is there."""

    row: int
    line: Line
    from_s: float
    until_s: float


def shown_lines(screens: list[Frame], end_s: float) -> Iterator[Shown]:
    """Yield each line of the screens once for each time that it appears."""
    for row in range(ROWS):
        on_row = [(screen.seconds, screen.lines[row]) for screen in screens]
        for line, group in groupby(on_row, key=lambda pair: pair[1]):
            from_s = next(group)[0]
            later = [seconds for seconds, other in on_row if seconds > from_s and other != line]
            if line:
                yield Shown(row, line, from_s, min(later, default=end_s))


def draw() -> str:
    """Return the picture of the recording."""
    screens = list(frames())
    end_s = screens[-1].seconds + _LAST_SCREEN_S
    width = round(COLUMNS * _COLUMN_PX + 2 * _MARGIN_PX)
    height = _BAR_PX + ROWS * _LINE_PX + 2 * _MARGIN_PX
    size = f'width="{width}" height="{height}"'
    names: dict[tuple[float, float], str] = {}  # of animations, by the times of their lines
    texts = []
    for shown in shown_lines(screens, end_s):
        times = (shown.from_s, shown.until_s)
        name = names.setdefault(times, f"a{len(names)}")
        is_at_end = shown.until_s == end_s
        top = _BAR_PX + _MARGIN_PX + (shown.row + 0.8) * _LINE_PX
        spans = "".join(map(_span, shown.line))
        hidden = "" if is_at_end else " h"
        texts.append(f'<text class="{name}{hidden}" x="{_MARGIN_PX}" y="{top:.0f}">{spans}</text>')
    rules = [_animation(name, *times, end_s) for times, name in names.items()]
    dots = "".join(
        f'<circle cx="{18 + 18 * number}" cy="15" r="5" fill="{color}"/>'
        for number, color in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}">
<title>{COMMAND}: a recorded terminal</title>
<style>
text{{font:{_FONT_PX}px {_FONT};fill:{_TEXT};white-space:pre}}
.h{{visibility:hidden}}
.b{{font-weight:bold}}
{"".join(rules)}
@media (prefers-reduced-motion:reduce){{text{{animation:none!important}}}}
</style>
<rect width="{width}" height="{height}" rx="8" fill="{_BACKGROUND}"/>
<path d="M0 {_BAR_PX}V8a8 8 0 0 1 8-8H{width - 8}a8 8 0 0 1 8 8v{_BAR_PX - 8}z" fill="{_BAR}"/>
{dots}<text x="{width / 2:.0f}" y="20" text-anchor="middle" style="fill:{_DIM}">{COMMAND}</text>
{chr(10).join(texts)}
</svg>
"""


def _span(run: Run) -> str:
    text = escape(run.text, quote=False)
    style = f' style="fill:{_COLORS[run.color]}"' if run.color in _COLORS else ""
    bold = ' class="b"' if run.is_bold else ""
    return f"<tspan{bold}{style}>{text}</tspan>" if style or bold else text


def _animation(name: str, from_s: float, until_s: float, end_s: float) -> str:
    """Return the rules that show a line from a time until another one, again and again."""
    steps = f"0%{{visibility:hidden}}{100 * from_s / end_s:.2f}%{{visibility:visible}}"
    if until_s < end_s:
        steps += f"{100 * until_s / end_s:.2f}%{{visibility:hidden}}"
    return (
        f".{name}{{animation:{name} {end_s:.2f}s step-end infinite}}@keyframes {name}{{{steps}}}\n"
    )


def main() -> None:
    """Record, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="draw the recording that is there")
    if not parser.parse_args().draw:
        record()
    PICTURE.write_text(draw(), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
