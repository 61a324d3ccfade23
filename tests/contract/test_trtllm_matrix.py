"""The table of releases and transceivers in docs/trtllm-verification.md says what the rules and the
stand-in do, cell by cell.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.engines.trtllm.engine import TrtllmEngine
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.testing.engine_requests import ask, collect, prompt_of, started, tokens
from dynamo_trtllm.worker import startup
from tests.kit.engines import answer, make, prefill_then_decode
from tests.kit.fake_packages import fake_tensorrt_llm

PAGE = Path(__file__).parents[2] / "docs" / "trtllm-verification.md"
HEADING = "## Releases and transceivers"
RELEASES = {
    "1.1.0": "1.1.0",
    "1.2.1": "1.2.1",
    "1.3 candidates": "1.3.0rc29",
    "1.4.0rc1": "1.4.0rc1",
}
# Column of the table -> the transceiver, and whether prefill and decode are separate.
COLUMNS: dict[str, tuple[dict[str, Any], bool]] = {
    "`UCX`, prefill and decode": ({"backend": "UCX"}, True),
    "`UCX`, aggregated": ({"backend": "UCX"}, False),
    "`NIXL`, prefill and decode": ({"backend": "NIXL"}, True),
    "`NIXL`, aggregated": ({"backend": "NIXL"}, False),
    "`UCX` with `transceiver_runtime: PYTHON`": (
        {"backend": "UCX", "transceiver_runtime": "PYTHON"},
        True,
    ),
    "`NIXL` with `transceiver_runtime: CPP`": (
        {"backend": "NIXL", "transceiver_runtime": "CPP"},
        True,
    ),
}
PROMPT = prompt_of(70)


def table() -> dict[tuple[str, str], str]:
    """Return the cells of the page by release and column."""
    lines = PAGE.read_text(encoding="utf-8").partition(HEADING)[2].splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("|"))
    end = next(index for index, line in enumerate(lines[start:], start) if not line.startswith("|"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:end]]
    head, _, *body = rows
    return {
        (row[0], column): cell
        for row in body
        for column, cell in zip(head[1:], row[1:], strict=True)
    }


@pytest.fixture(scope="module")
def expected(gpt_oss: Path) -> list[int]:
    """Return the answer of the torch engine itself."""

    async def ask_torch() -> list[int]:
        engine = make("torch", gpt_oss, Role.AGGREGATED)
        async with started(engine):
            return await answer(engine, PROMPT)

    return asyncio.run(ask_torch())


async def outcome(
    folder: Path, transceiver: dict[str, Any], is_split: bool, expected: list[int]
) -> str:
    """Return what happens to workers with these arguments, as the page has it."""
    roles = (Role.PREFILL, Role.DECODE) if is_split else (Role.AGGREGATED,)
    given = {"cache_transceiver_config": {"max_tokens_in_buffer": 8192, **transceiver}}
    try:
        engines = [make("trtllm", folder, role, ttl_s=60.0, **given) for role in roles]
    except ConfigError as exc:
        ((_, argument),) = re.findall(r"has no ([a-z_]+)\.([a-z_]+)\.", exc.message)
        return f"rejected: no such argument (`{argument}`)"
    seen = set()
    for engine in engines:
        try:
            await startup.preflight(engine, [])
        except ConfigError as exc:
            (rule,) = re.findall(r"\[([a-z-]+)\]", exc.message)
            return f"rejected: `{rule}`"
        assert isinstance(engine, TrtllmEngine)
        seen |= {
            found.rule
            for found in engine.preflight([])
            if found.field.startswith(("cache_trans", "release"))
        }
    async with started(*engines):
        chunks = await (
            prefill_then_decode(*engines, PROMPT) if is_split else collect(engines[0], ask(PROMPT))
        )
        assert tokens(chunks) == expected
    return ", ".join(["works with the stand-in", *(f"`{rule}`" for rule in sorted(seen))])


def test_table_covers_everything_that_is_tested() -> None:
    assert set(table()) == {(release, column) for release in RELEASES for column in COLUMNS}


# Aggregated workers of each release answer in test_engine_trtllm.py, too.
@pytest.mark.parametrize(
    "column",
    [
        pytest.param(column, marks=() if is_split else pytest.mark.long)
        for column, (_, is_split) in COLUMNS.items()
    ],
)
@pytest.mark.parametrize("release", RELEASES)
async def test_cell_when_the_workers_start_then_it_says_what_happens(
    release: str, column: str, gpt_oss: Path, expected: list[int]
) -> None:
    with fake_tensorrt_llm(RELEASES[release]):
        assert await outcome(gpt_oss, *COLUMNS[column], expected) == table()[release, column]
