"""The load of a chaos run: prompts whose answers are known from an undisturbed run of the same deployment."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.chaos.deployment import Deployment, NotServing
from benchmarks.client import Client, Load
from benchmarks.stream import Record, StreamConnection

NUM_PROMPTS = 16
_MANY = 1_000_000_000
_TOPICS = ("rivers", "bridges", "clocks", "maps", "bread", "glass", "winds", "ships")


def prompts(count: int = NUM_PROMPTS) -> tuple[str, ...]:
    """Different ones, of a few dozen tokens."""
    return tuple(f"Tell me about {_TOPICS[i % len(_TOPICS)]}, in {i + 3} parts. " * (1 + i % 5) for i in range(count))


def load(deployment: Deployment, *, osl: int, streams: int, timeout_s: float, ramp_s: float = 0.0, **more: int) -> Load:
    """Endless, greedy, of answers whose text is kept. `more`: fields of Load."""
    return Load(
        url=deployment.url,
        model=deployment.options.model,
        concurrency=streams,
        osl=osl,
        timeout_s=timeout_s,
        seconds=more.get("seconds", _MANY),
        requests=more.get("requests", _MANY),
        keep_text=True,
        ramp_s=ramp_s,
        prompts=prompts(more.get("prompts", NUM_PROMPTS)),
        extra={"temperature": 0},
    )


async def run(wanted: Load, connection: type[StreamConnection] = StreamConnection) -> list[Record]:
    """To its end."""
    client = Client(wanted, connection=connection)
    try:
        return await client.run()
    finally:
        client.aclose()


async def undisturbed(deployment: Deployment, *, osl: int, count: int = NUM_PROMPTS) -> Sequence[str]:
    """The answers, by prompt. Raises NotServing when one of them fails with nothing broken."""
    records = await run(load(deployment, osl=osl, streams=count, timeout_s=60, requests=count, prompts=count))
    for record in records:
        if not record.is_ok or record.output_tokens != osl:
            raise NotServing(f"undisturbed request {record.index}: {record.error or 'ended early'}")
    return [record.text or "" for record in sorted(records, key=lambda record: record.index)]
