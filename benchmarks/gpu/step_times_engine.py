"""The engine process of `benchmarks.gpu.step_times`: one vLLM engine, stepped in this process."""

from __future__ import annotations

import importlib
import itertools
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from dynamo_trtllm.engines.vllm import compilation
from dynamo_trtllm.engines.vllm.args import EXTENSION

_IDS = range(1000, 190_000)  # ordinary tokens of o200k
_WARM_STEPS = 4  # of each kind, in which kernels may be compiled
_STEPS = 12  # of each kind, whose times count
_MAX_STEPS_TO_BEGIN = 2000  # until all streams generate


class Engine:
    """One engine of vLLM in this process.

    Args:
        asked: see `step_times`.
    """

    def __init__(self, asked: dict[str, Any]) -> None:
        self._parameters = importlib.import_module("vllm").SamplingParams
        engine_args = importlib.import_module("vllm.engine.arg_utils").EngineArgs
        engine = importlib.import_module("vllm.v1.engine.llm_engine").LLMEngine
        arguments = {
            "model": asked["model"],
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": asked["prompt_tokens"] + 4096,
            "max_num_batched_tokens": asked["max_num_batched_tokens"],
            "max_num_seqs": 256,
            "gpu_memory_utilization": 0.85,
            "enable_prefix_caching": False,
            "block_size": 128,
            "worker_extension_cls": EXTENSION,
            **asked["engine_args"],
        }
        self._engine = engine.from_engine_args(engine_args(**arguments))
        # In one process, the scheduler is at hand.
        self.scheduler = self._engine.engine_core.engine_core.scheduler
        self._max_tokens = self.scheduler.max_num_scheduled_tokens
        self._random = random.Random(7)
        self._ids = itertools.count()

    def add(self, prompt_tokens: int, max_tokens: int, vocabulary: int) -> str:
        """Add a request. Return its id."""
        request_id = str(next(self._ids))
        prompt = [one % vocabulary for one in self._random.choices(_IDS, k=prompt_tokens)]
        parameters = self._parameters(
            temperature=1.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, parameters)
        return request_id

    def limit(self, tokens: int | None) -> None:
        """Limit the tokens of a step. None: as configured."""
        self.scheduler.max_num_scheduled_tokens = tokens or self._max_tokens

    def step(self, count: int = 1) -> None:
        """Run steps."""
        for _ in range(count):
            self._engine.step()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests."""
        self._engine.abort_request(list(request_ids))

    def drain(self) -> None:
        """Run steps until no request is left."""
        while self._engine.has_unfinished_requests():
            self._engine.step()


def measure(asked: dict[str, Any], answer: Path) -> None:
    """Measure all kinds of steps, and write what was found after each number of streams."""
    begun_s = time.monotonic()
    engine = Engine(asked)
    found: dict[str, Any] = {
        "start_s": round(time.monotonic() - begun_s, 1),
        "is_complete": False,
        "rows": [],
    }
    vocabulary = int(engine.scheduler.vllm_config.model_config.get_vocab_size())
    for streams in asked["streams"]:
        found["rows"] += _with_streams(engine, asked, streams, vocabulary)
        answer.write_bytes(orjson.dumps(found))
    found["is_complete"] = True
    answer.write_bytes(orjson.dumps(found))


def _with_streams(
    engine: Engine, asked: dict[str, Any], streams: int, vocabulary: int
) -> list[dict[str, Any]]:
    """Return the times of steps with this number of streams."""
    running = [engine.add(asked["context"], 4000, vocabulary) for _ in range(streams)]
    for _ in range(_MAX_STEPS_TO_BEGIN):
        if sum(one.num_output_tokens > 0 for one in engine.scheduler.running) == streams:
            break
        engine.step()
    rows = []
    for tokens in asked["tokens"]:
        if not streams and not tokens:
            continue
        needed = tokens * (_WARM_STEPS + _STEPS + 6)
        prompts = [
            engine.add(asked["prompt_tokens"], 1, vocabulary)
            for _ in range(-(-needed // asked["prompt_tokens"]))
        ]
        engine.limit(streams + tokens)
        engine.step(_WARM_STEPS)
        begun_s = time.monotonic()
        engine.step(_STEPS)
        seconds = (time.monotonic() - begun_s) / _STEPS
        rows.append(
            {"streams": streams, "prompt_tokens": tokens, "mean_ms": round(1000 * seconds, 2)}
        )
        print(rows[-1], file=sys.stderr, flush=True)
        engine.limit(None)
        engine.abort(prompts)
        engine.step(3)
    engine.abort(running)
    engine.drain()
    return rows


def main() -> None:
    """Run the process. Arguments: the file with what is asked, and the file for the answer."""
    question, answer = map(Path, sys.argv[1:])
    asked = orjson.loads(question.read_bytes())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    cache = asked["compile_cache"]
    os.environ |= compilation.cache_folders(cache and Path(cache), os.environ)
    measure(asked, answer)


if __name__ == "__main__":
    main()
