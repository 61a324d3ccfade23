"""The load of a chaos run: prompts whose answers are known from a run without faults."""

from __future__ import annotations

from collections.abc import Sequence

from ..load_client import Client, Load
from ..stream import RequestRecord, StreamConnection
from .deployment import Deployment, NotReady

NUM_PROMPTS = 16
_MANY = 1_000_000_000
_TOPICS = ("rivers", "bridges", "clocks", "maps", "bread", "glass", "winds", "ships")


def prompts(count: int = NUM_PROMPTS) -> tuple[str, ...]:
    """Return different prompts of a few dozen tokens each."""
    return tuple(
        f"Tell me about {_TOPICS[i % len(_TOPICS)]}, in {i + 3} parts. " * (1 + i % 5)
        for i in range(count)
    )


def build_load(
    deployment: Deployment,
    *,
    osl: int,
    streams: int,
    timeout_s: float,
    ramp_s: float = 0.0,
    **more: int,
) -> Load:
    """Return a greedy load without end that records the text of answers.

    Args:
        deployment: where to send the requests.
        osl: tokens per answer.
        streams: concurrent requests.
        timeout_s: limit of one request in seconds.
        ramp_s: seconds over which the streams start.
        more: `seconds` and `requests` of Load, and `prompts`, the number of different prompts.
    """
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


async def run_load(
    load: Load, connection: type[StreamConnection] = StreamConnection
) -> list[RequestRecord]:
    """Run a load to its end and return the records."""
    client = Client(load, connection=connection)
    try:
        return await client.run()
    finally:
        client.aclose()


async def reference_answers(
    deployment: Deployment, *, osl: int, count: int = NUM_PROMPTS
) -> Sequence[str]:
    """Return the answer to each prompt without a fault. Raise NotReady if a request fails."""
    records = await run_load(
        build_load(deployment, osl=osl, streams=count, timeout_s=60, requests=count, prompts=count)
    )
    for record in records:
        if not record.is_ok or record.output_tokens != osl:
            raise NotReady(
                f"request {record.index} failed without a fault: {record.error or 'it ended early'}"
            )
    return [record.text or "" for record in sorted(records, key=lambda record: record.index)]
