"""AIPerf: a few streamed chats, counted by its own report."""

import json
import os
import subprocess
from pathlib import Path

from steps import check, run


def _profile(base_url: str, model: str, *more: str) -> dict:
    # docs: aiperf
    command = ["aiperf", "profile", "--model", model, "--url", base_url, "--streaming"]
    command += [
        "--tokenizer",
        os.environ["TOKENIZER"],
        "--request-count",
        "4",
        "--concurrency",
        "2",
    ]
    # docs: end
    command += ["--isl", "20", "--osl", "12", "--ui", "none", "--artifact-dir", "out", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    check(done.returncode == 0, (done.stdout + done.stderr)[-1500:])
    found = sorted(Path("out").rglob("profile_export_aiperf.json"))
    check(found, (done.stdout + done.stderr)[-1500:])
    return json.loads(found[0].read_text())


def _count(report: dict) -> str:
    check(report["request_count"]["avg"] == 4, report)
    check(not report.get("error_summary"), report.get("error_summary"))
    return f"4 requests, TTFT {report['time_to_first_token']['avg']:.0f} ms"


def chat(base_url: str, model: str) -> str:
    return _count(_profile(base_url, model, "--endpoint-type", "chat"))


def responses(base_url: str, model: str) -> str:
    return _count(_profile(base_url, model, "--endpoint-type", "responses"))


if __name__ == "__main__":
    run(chat, responses)
