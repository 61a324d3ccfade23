"""Kill the decode worker of a running stream with SIGKILL, and record when each piece of its text
arrives.

    python -m benchmarks.failover

Starts a deployment of the bundled torch model with two prefill and two decode workers, sends one
streaming chat twice (once undisturbed, as the reference), and writes the times and texts of the
second one as JSON to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import signal
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from .chaos.deployment import Deployment, NotReady, Options

QUESTION = "Explain the concept of disaggregated serving in LLM inference in 3 sentences."
_KILL_AFTER = 20  # events with text
_TIMEOUT_S = 60.0
_RESULTS = Path(__file__).parent / "results"


def stream(deployment: Deployment, kill_after: int | None = None) -> dict[str, Any]:
    """Send the chat and read its stream.

    With `kill_after`, kill the worker that decodes after so many events.

    Returns:
        `events`, with the seconds since the request and the text of each, and `killed_s` and
            `victim` of the kill.
    """
    connection = http.client.HTTPConnection("127.0.0.1", deployment.http_port, timeout=_TIMEOUT_S)
    body = {
        "model": deployment.model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "stream": True,
    }
    record: dict[str, Any] = {"events": [], "killed_s": None, "victim": None, "finish_reason": None}
    begun = time.perf_counter()
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        decode = response.getheader("x-decode-instance")
        for line in iter(response.readline, b""):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise NotReady(f"the stream ended with {event['error']}")
            for choice in event["choices"]:
                delta = choice["delta"]
                text = delta.get("reasoning_content") or delta.get("content") or ""
                record["finish_reason"] = choice.get("finish_reason") or record["finish_reason"]
                if text:
                    record["events"].append([round(time.perf_counter() - begun, 4), text])
            is_killed = record["killed_s"] is not None
            if kill_after is not None and not is_killed and len(record["events"]) >= kill_after:
                record["victim"] = next(
                    name for name in deployment.workers if deployment.instance(name) == decode
                )
                deployment.send(record["victim"], signal.SIGKILL)
                record["killed_s"] = round(time.perf_counter() - begun, 4)
    finally:
        connection.close()
    return record


def summary(record: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Return the longest pause after the kill, in seconds, and whether both texts are equal."""
    times = [at for at, _ in record["events"]]
    pauses = [later - earlier for earlier, later in pairwise(times) if later > record["killed_s"]]
    texts = ["".join(text for _, text in answer["events"]) for answer in (record, reference)]
    return {
        "pause_s": round(max(pauses), 4),
        "is_text_equal": texts[0] == texts[1],
        "characters": len(texts[0]),
    }


def main() -> None:
    """Run it and write the result."""
    argparse.ArgumentParser(
        prog=f"python -m {__package__}.failover",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    deployment = Deployment(Options(engine="torch"))
    try:
        deployment.start()
        stream(deployment)  # warms the workers up
        reference = stream(deployment)
        record = stream(deployment, _KILL_AFTER)
    finally:
        deployment.stop()
    result = {
        "what": "failover",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "question": QUESTION,
    }
    result |= summary(record, reference) | {"reference": reference, "stream": record}
    path = _RESULTS / f"failover-{re.sub('[^0-9]', '', result['at'])[:14]}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(
        f"{record['victim']} was killed after {record['killed_s']:.2f} s; the pause was"
        f" {result['pause_s']:.2f} s"
    )
    print(f"text equal to the undisturbed one: {result['is_text_equal']}; written: {path}")


if __name__ == "__main__":
    main()
