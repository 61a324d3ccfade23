"""Measures the CPU time of open streams without traffic.

python -m benchmarks.plane.idle --url http://localhost:8000 --model NAME --streams 1000 \\
  --seconds 10 --pid frontend=PID
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import orjson
import uvloop

from ..load_client import Client, Load, ShardResult, summarize_shards
from ..stream import RequestRecord
from ..summary import LoadSummary, ProcessMeter

_RAMP_S = 5.0
_SETTLE_S = 5.0


async def idle(load: Load, seconds: float, pids: dict[str, int]) -> LoadSummary:
    """Open the streams and measure for this many seconds.

    Returns:
        A summary without tokens. `ok` is the number of streams that were open all the time.
    """
    opened: list[RequestRecord] = []
    client = Client(load, on_open=opened.append)
    running = asyncio.create_task(client.run())
    await asyncio.sleep(load.ramp_s + _SETTLE_S)
    meter = ProcessMeter(pids)
    meter.start()
    begun_s = time.perf_counter()
    cpu_s = time.process_time()
    await asyncio.sleep(seconds)
    share = ShardResult(
        records=[], begun_s=begun_s, ended_s=time.perf_counter(), cpu_s=time.process_time() - cpu_s
    )
    found = summarize_shards([share], meter, osl=load.osl)
    found["ok"] = sum(record.status == 200 and not record.end_s for record in opened)
    found["errors"] = (
        {"not_open": load.concurrency - found["ok"]} if found["ok"] < load.concurrency else {}
    )
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    client.aclose()
    return found


def main() -> None:
    """Print the summary as one JSON line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.idle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", default="http://localhost:8000", help="address of the frontend")
    parser.add_argument("--model", required=True, help="name of the model")
    parser.add_argument(
        "--streams", type=int, default=1000, help="number of streams (default: 1000)"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="duration of the measurement (default: 10)"
    )
    pid = "measure the CPU time of this process and its children; may be repeated"
    parser.add_argument("--pid", action="append", default=[], metavar="NAME=PID", help=pid)
    args = parser.parse_args()
    load = Load(
        url=args.url,
        model=args.model,
        concurrency=args.streams,
        requests=args.streams,
        osl=64,
        ramp_s=_RAMP_S,
    )
    pids = {name: int(pid) for name, _, pid in (option.partition("=") for option in args.pid)}
    sys.stdout.write(orjson.dumps(uvloop.run(idle(load, args.seconds, pids))).decode() + "\n")


if __name__ == "__main__":
    main()
