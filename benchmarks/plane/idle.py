"""What streams cost that are open and silent: opens them, lets all be quiet, then counts seconds.

python -m benchmarks.plane.idle --url http://localhost:8000 --model NAME --streams 1000 --seconds 10 --pid frontend=PID
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import orjson
import uvloop

from benchmarks.client import Client, Load, Share, metered
from benchmarks.figures import Figures, ProcessMeter
from benchmarks.stream import Record

_RAMP_S = 5.0
_SETTLE_S = 5.0


async def idle(load: Load, seconds: float, pids: dict[str, int]) -> Figures:
    """Figures with no tokens: `ok` is how many streams were open all the time, `processes` what they cost."""
    opened: list[Record] = []
    client = Client(load, on_open=opened.append)
    running = asyncio.create_task(client.run())
    await asyncio.sleep(load.ramp_s + _SETTLE_S)
    meter = ProcessMeter(pids)
    meter.start()
    begun_s, cpu_s = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    share = Share(records=[], begun_s=begun_s, ended_s=time.perf_counter(), cpu_s=time.process_time() - cpu_s)
    found = metered([share], meter, osl=load.osl)
    found["ok"] = sum(record.status == 200 and not record.end_s for record in opened)
    found["errors"] = {"not_open": load.concurrency - found["ok"]} if found["ok"] < load.concurrency else {}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    client.aclose()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plane.idle", description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--pid", action="append", default=[], metavar="NAME=PID")
    args = parser.parse_args()
    load = Load(url=args.url, model=args.model, concurrency=args.streams, requests=args.streams, osl=64, ramp_s=_RAMP_S)
    pids = {name: int(pid) for name, _, pid in (each.partition("=") for each in args.pid)}
    sys.stdout.write(orjson.dumps(uvloop.run(idle(load, args.seconds, pids))).decode() + "\n")


if __name__ == "__main__":
    main()
