"""Runs a shape with aiperf, installed in its own environment, and converts its records.

With aiperf 0.13.0, `--tokenizer builtin` is tiktoken's o200k_base. tiktoken finds the vocabulary
offline in TIKTOKEN_CACHE_DIR under the SHA-1 of its download address.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from ..credentials import sent_api_key
from ..stream import RequestRecord
from ..summary import summarize
from . import phases
from .goodput import count_good
from .point import Target
from .result import Point
from .shapes import Level, Shape
from .steady import steady

VERSION = "0.13.0"
_O200K_CACHE_NAME = "fb374d419588a4632f3f557e76b4b70aebbca790"
_EXPORT = "profile_export.jsonl"
_NS = 1e-9


def command(program: Path, shape: Shape, target: Target, level: Level, folder: Path) -> list[str]:
    """Return aiperf's command line as in the guides, with the numbers of this point."""
    extra: dict[str, Any] = {
        "max_tokens": shape.osl,
        "min_tokens": shape.osl,
        "ignore_eos": True,
    } | shape.extra
    api_key = sent_api_key()
    return [
        *(
            str(program),
            "profile",
            "--model",
            target.model,
            "--tokenizer",
            "builtin",
            "--endpoint-type",
            "chat",
        ),
        *(
            "--endpoint",
            "/v1/chat/completions",
            "--streaming",
            "--use-server-token-count",
            "--url",
            target.url,
        ),
        *("--synthetic-input-tokens-mean", str(shape.isl), "--synthetic-input-tokens-stddev", "0"),
        *("--output-tokens-mean", str(shape.osl), "--output-tokens-stddev", "0"),
        *("--extra-inputs", orjson.dumps(extra).decode()),
        *(
            *(
                ("--concurrency", str(level.concurrency))
                if level.concurrency
                else ("--request-rate", f"{level.request_rate:g}")
            ),
            "--request-count",
            str(shape.requests_at(level)),
        ),
        *("--warmup-request-count", str(shape.warmup_at(level))),
        *("--num-dataset-entries", str(shape.dataset), "--random-seed", str(shape.seed)),
        *(
            "--request-timeout-seconds",
            str(target.timeout_s),
            "--ui",
            "none",
            "--artifact-dir",
            str(folder),
        ),
        *(("--api-key", api_key) if api_key else ()),
    ]


def install(folder: Path) -> Path:
    """Return the path of aiperf.

    Install it if it is missing (about 1.2 GB). Raise CalledProcessError.
    """
    program = folder / "bin" / "aiperf"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run(
            [str(folder / "bin" / "pip"), "install", "--quiet", f"aiperf=={VERSION}"], check=True
        )
    return program


def vocabulary(folder: Path) -> Path:
    """Write o200k_base as tiktoken expects it. Return the folder."""
    from dynamo_trtllm.models.vocabulary import o200k_ranks_path

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _O200K_CACHE_NAME
    if not path.exists():
        shutil.copyfile(o200k_ranks_path(), path)
    return folder


def measure(
    program: Path, shape: Shape, target: Target, level: Level, repetition: int, folder: Path
) -> tuple[Point, list[RequestRecord]]:
    """Measure a point with aiperf.

    Raises:
        CalledProcessError: aiperf failed.
        ValueError: aiperf wrote no records.
    """
    environment = os.environ | {
        "TIKTOKEN_CACHE_DIR": str(vocabulary(folder.parent / "tiktoken")),
        "AIPERF_HTTP_CONNECTION_LIMIT": str(
            max(level.concurrency, 1024)
        ),  # its default is lower than the guides' concurrency
    }
    before = phases.read_totals(target.url)
    subprocess.run(command(program, shape, target, level, folder), check=True, env=environment)
    records = read(folder / _EXPORT)
    if not records:
        raise ValueError(
            f"aiperf wrote no requests to {folder / _EXPORT}. See its log in that folder."
        )
    origin_s = min(record.planned_s for record in records)
    wall_s = max(record.end_s for record in records) - origin_s
    point = Point(
        level=level,
        repetition=repetition,
        origin_s=origin_s,
        figures=summarize(records, wall_s=wall_s, osl=shape.osl, processes={}),
        steady=steady(records, level.concurrency) if level.concurrency else None,
        good=count_good(records, target.goals_ms),
        phase_s=phases.means(before, phases.read_totals(target.url)),
    )
    return point, records


def read(path: Path) -> list[RequestRecord]:
    """Read aiperf's records without those of its warm-up.

    Raise ValueError if the file is invalid.
    """
    try:
        lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    except (OSError, orjson.JSONDecodeError) as exc:
        raise ValueError(f"aiperf's records at {path} can't be read: {exc}") from exc
    return [_record(index, line) for index, line in enumerate(_profiling(lines), 1)]


def _profiling(lines: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    return (line for line in lines if line["metadata"].get("benchmark_phase") != "warmup")


def _record(index: int, line: Mapping[str, Any]) -> RequestRecord:
    metadata = line["metadata"]
    metrics = line.get("metrics") or {}

    def value(name: str) -> Any:
        found = metrics.get(name)
        return None if found is None else found["value"]

    begin_s = metadata["request_start_ns"] * _NS
    end_s = metadata["request_end_ns"] * _NS
    ttft_ms = value("time_to_first_token")
    num_tokens = int(value("output_sequence_length") or 0)
    gap_ms = value("inter_token_latency")
    first_s = None if ttft_ms is None else begin_s + ttft_ms / 1e3
    last_s = (
        end_s if gap_ms is None or first_s is None else first_s + gap_ms / 1e3 * (num_tokens - 1)
    )
    gaps_ms = value("inter_chunk_latency") or ()
    error = line.get("error")
    return RequestRecord(
        index=index,
        planned_s=begin_s,
        status=200 if error is None else int(error.get("code") or 0),
        error="" if error is None else str(error.get("type") or "error"),
        first_s=first_s,
        last_s=last_s if first_s is not None else None,
        end_s=end_s,
        events=len(gaps_ms) + (first_s is not None),
        output_tokens=num_tokens,
        prompt_tokens=int(value("usage_prompt_tokens") or value("input_sequence_length") or 0),
        cached_tokens=int(value("usage_prompt_cache_read_tokens") or 0),
        gaps_s=array("d", (gap_ms / 1e3 for gap_ms in gaps_ms)),
    )
