"""A baseline: vLLM's disaggregated serving with two of its servers and a minimal proxy.

The proxy sends the request with `max_tokens` 1 to the prefill server, then the request with the returned
`kv_transfer_params` to the decode server, and forwards its stream. It has no discovery, retry or cancellation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from dynamo_trtllm.network.addresses import free_ports

from .plan import Plan
from .result import Row
from .scenario import ScenarioResult, ShapeResults, Sizes, measure_shapes, shape_rows
from .server import Command, Server, vllm_server

ARM = "vLLM's servers and a proxy"
_CONNECTOR = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
_ASK_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body for the prefill server."""
    without = {name: value for name, value in body.items() if name != "stream_options"}
    return without | {"stream": False, "max_tokens": 1, "kv_transfer_params": _ASK_PREFILL}


def application(client: httpx.AsyncClient, prefill: str, decode: str) -> Starlette:
    """Return the proxy, with `POST /v1/completions` and `GET /health`."""

    async def completions(request: Request) -> StreamingResponse | JSONResponse:
        body = await request.json()
        first = await client.post(f"{prefill}/v1/completions", json=prefill_body(body))
        if first.status_code != 200:
            return JSONResponse(first.json(), status_code=first.status_code)
        params = first.json()["kv_transfer_params"]

        async def answer() -> AsyncIterator[bytes]:
            decode_body = body | {"kv_transfer_params": params}
            async with client.stream("POST", f"{decode}/v1/completions", json=decode_body) as second:
                async for part in second.aiter_raw():
                    yield part

        return StreamingResponse(answer(), media_type="text/event-stream")

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({})

    return Starlette(routes=[Route("/v1/completions", completions, methods=["POST"]), Route("/health", health)])


def beside(pair: ShapeResults, found: ShapeResults) -> list[Row]:
    """Return the results of our workers as ratios of these, for shapes that both completed."""
    rows = []
    for name in found.keys() & pair.keys():
        ours, theirs = pair[name], found[name]
        if ours["ok"] == theirs["ok"] > 0:
            tokens = ours["tokens_per_s"] / theirs["tokens_per_s"]
            first = ours["ttft_ms"]["p50"] / theirs["ttft_ms"]["p50"]
            rows.append(Row(what=f"{name}, ours / {ARM}", value=f"tokens/s {tokens:.3f}, TTFT p50 {first:.3f}"))
    return sorted(rows, key=lambda row: row.what)


async def run(plan: Plan, sizes: Sizes, logs: Path, pair: ShapeResults) -> ScenarioResult:
    """Measure the shapes with vLLM's servers and the proxy, and compare with our results from the same run.

    Raise NotReady if a server does not become ready.
    """
    with ExitStack() as stack:
        servers = []
        for half, role in enumerate(("prefill", "decode")):
            env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports())}
            more = ["--kv-transfer-config", _CONNECTOR]
            servers.append(vllm_server(plan, half, logs / f"proxied-{role}.log", more, env))
            stack.callback(servers[-1].stop)
            servers[-1].begin()
        for server in servers:
            await asyncio.to_thread(server.wait)
        port = free_ports()
        argv = [f"--prefill={servers[0].url}", f"--decode={servers[1].url}", f"--port={port}"]
        proxy = Server(Command(module=f"{__package__}.proxy", argv=argv, port=port), logs / "proxy.log")
        stack.callback(proxy.stop)
        proxy.begin()
        await asyncio.to_thread(proxy.wait)
        found = await measure_shapes(proxy.url, sizes)
    return [*shape_rows(ARM, found, len(plan.gpus)), *beside(pair, found)], dict(found)


def main() -> None:
    """Run the proxy until it is stopped."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.proxy", description=__doc__)
    parser.add_argument("--prefill", required=True, help="URL of the prefill server")
    parser.add_argument("--decode", required=True, help="URL of the decode server")
    parser.add_argument("--port", type=int, required=True, help="port of the proxy")
    args = parser.parse_args()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)
    uvicorn.run(application(client, args.prefill, args.decode), host="127.0.0.1", port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
