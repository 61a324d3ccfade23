"""Streams chat answers without any server of models: what uvicorn itself costs per token.

A program that `uvicorn_recipe` starts in an environment of its own, so it imports nothing of this
project. It is a stand-in: it makes each event from a fixed text and sends the events of all
streams at the steps of one clock, as a decode worker would. It parses no prompt, routes nothing and
receives no tokens from another process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


class Clock:
    """Wakes all streams once per step.

    Args:
        step_s: length of a step; 0: steps take no time.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._next: asyncio.Future[None] | None = None

    async def step(self) -> None:
        """Wait for the end of the step that runs."""
        if not self._step_s:
            await asyncio.sleep(0)
            return
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            # Steps begin at multiples of their length, so a late one does not delay the others.
            loop.call_later(self._step_s - loop.time() % self._step_s, self._end)
        await asyncio.shield(self._next)

    def _end(self) -> None:
        ended, self._next = self._next, None
        if ended is not None:
            ended.set_result(None)


async def answer(clock: Clock, receive: Receive, send: Send) -> None:
    """Answer a chat request with a stream of `max_tokens` events, the usage and [DONE]."""
    body = json.loads(await _body(receive))
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    num_tokens = int(body.get("max_tokens", 1))
    for number in range(num_tokens):
        await clock.step()
        choice = {"index": 0, "delta": {"content": f" {number}"}, "finish_reason": None}
        await _send_event(send, {"choices": [choice]})
    usage = {"prompt_tokens": 0, "completion_tokens": num_tokens, "total_tokens": num_tokens}
    last = {"index": 0, "delta": {}, "finish_reason": "length"}
    await _send_event(send, {"choices": [last]})
    await _send_event(send, {"choices": [], "usage": usage})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def _send_event(send: Send, fields: dict[str, Any]) -> None:
    fixed = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    data = b"data: " + json.dumps(fixed | fields, separators=(",", ":")).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def main() -> None:
    """Serve until a signal."""
    import uvicorn  # only in the environment of this program

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--ssl-certfile")
    parser.add_argument("--ssl-keyfile")
    args = parser.parse_args()
    clock = Clock(args.step_s)

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            await answer(clock, receive, send)
        else:  # it has no metrics and no other page
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    uvicorn.run(
        app,
        host=args.host,
        port=args.port,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        log_level="warning",
        access_log=False,
    )


if __name__ == "__main__":
    main()
