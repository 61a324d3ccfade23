"""Times of vLLM's steps with other kernels for the experts: decode steps, and steps with prompts.

python -m benchmarks.gpu.step_times --moe-backends triton,marlin

Each backend gets an engine of its own, one after the other, with gpt-oss-120b's architecture and
random weights. A step has some streams, each with --context tokens, and some tokens of prompts of
--prompt-tokens. For each pair of these numbers, equal steps follow each other, so the mean time of
a step is the time between two tokens of the streams. No server runs.

The result file is written after each backend. A backend that can not start is named in it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from dynamo_trtllm.config.text_table import format_table

from . import machine
from .model import FULL_LAYERS, write_model
from .plan import ENVIRONMENT, MODEL_NAME, STEP_TOKENS

_CHILD = f"{__package__}.step_times_engine"
_MIN_ENGINE_S = 60.0  # no engine starts and is measured faster


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a comma-separated list. Raises ValueError: one is no number."""
    return tuple(int(part) for part in text.split(","))


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exit with status 2 on errors."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.step_times",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--moe-backends", default="triton,marlin", help="vLLM's names (default: triton,marlin)")
    add("--streams", type=numbers, default=(0, 16, 64), help="streams of a step (default: 0,16,64)")
    add(
        "--tokens",
        type=numbers,
        default=(0, 128, 256, 512, 1024, 2048, 4096, 8000),
        help="prompt tokens of a step (default: 0,128,256,512,1024,2048,4096,8000)",
    )
    add("--context", type=int, default=2048, help="tokens of a stream's prompt (default: 2048)")
    add("--prompt-tokens", type=int, default=8192, help="length of a prompt (default: 8192)")
    add("--layers", type=int, default=FULL_LAYERS, help="layers of the model (default: 36, all)")
    add("--model", help="a model folder in place of gpt-oss-120b's architecture")
    add("--engine-args", type=json.loads, default={}, help="JSON object with engine arguments")
    add("--compile-cache", type=Path, help="folder for compiled kernels, which a later run uses")
    add("--budget-s", type=float, default=900.0, help="for all backends together (default: 900)")
    add("--out", type=Path, required=True, help="the result file")
    return parser.parse_args(argv)


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure all backends, and return the result.

    Args:
        args: see `arguments`.
        folder: where a model without weights and the files of the engines are written.
    """
    until_s = time.monotonic() + args.budget_s
    model = args.model or str(write_model(folder / MODEL_NAME, layers=args.layers))
    result: dict[str, Any] = {
        "what": "step-times",
        "commit": machine.commit(),
        "machine": machine.machine(),
        "versions": machine.versions(),
        "layers": args.layers,
        "context_tokens": args.context,
        "prompt_tokens": args.prompt_tokens,
        "engine_arguments": args.engine_args,
        "backends": {},
        "not_run": {},
    }
    for backend in args.moe_backends.split(","):
        left_s = until_s - time.monotonic()
        if left_s < _MIN_ENGINE_S:
            result["not_run"][backend] = f"only {left_s:.0f} s left"
        else:
            print(f"{backend}: {left_s:.0f} s left", file=sys.stderr, flush=True)
            _measure(args, folder, model, backend, left_s, result)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
    return result


def _measure(
    args: argparse.Namespace,
    folder: Path,
    model: str,
    backend: str,
    left_s: float,
    result: dict[str, Any],
) -> None:
    """Measure one backend in a process of its own, and add what it found to the result."""
    asked = {
        "model": model,
        "max_num_batched_tokens": STEP_TOKENS,
        "engine_args": {**args.engine_args, "moe_backend": backend},
        "streams": args.streams,
        "tokens": args.tokens,
        "context": args.context,
        "prompt_tokens": args.prompt_tokens,
        "compile_cache": None if args.compile_cache is None else str(args.compile_cache),
    }
    question = folder / f"{backend}-asked.json"
    answer = folder / f"{backend}-found.json"
    question.write_bytes(orjson.dumps(asked))
    command = [sys.executable, "-m", _CHILD, str(question), str(answer)]
    try:
        ended = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, timeout=left_s)
        why = f"exit status {ended.returncode}"
    except subprocess.TimeoutExpired:
        why = f"it had not ended after {left_s:.0f} s"
    # What was measured before an error counts.
    if answer.exists():
        result["backends"][backend] = orjson.loads(answer.read_bytes())
    if not answer.exists() or not result["backends"][backend]["is_complete"]:
        result["not_run"][backend] = why


def table(result: dict[str, Any]) -> str:
    """Return the mean times of all backends in milliseconds, a row for each kind of step."""
    backends = result["backends"]
    kinds: dict[tuple[int, int], dict[str, str]] = {}
    for backend, found in backends.items():
        for row in found["rows"]:
            kind = (row["streams"], row["prompt_tokens"])
            kinds.setdefault(kind, {})[backend] = f"{row['mean_ms']:.1f}"
    rows = [
        [str(streams), str(tokens), *(times.get(backend, "") for backend in backends)]
        for (streams, tokens), times in sorted(kinds.items())
    ]
    heads = ["streams", "prompt tokens", *(f"{name} ms" for name in backends)]
    return format_table([heads, *rows])


def main() -> None:
    """Run the command."""
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        result = run(args, Path(folder))
    print(table(result))
    for backend, why in result["not_run"].items():
        print(f"{backend}: not complete: {why}")


if __name__ == "__main__":
    main()
