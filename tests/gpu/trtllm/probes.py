"""Questions to one LLM of the installed TensorRT-LLM, asked without the adapter: does it behave as
the adapter assumes?

`tests.gpu.trtllm.report` runs this as a process of its own; over the stand-in, a test does.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynamo_trtllm.engines.manifests import ApiManifest, Presence
from dynamo_trtllm.engines.trtllm.api_manifests import release_for
from tests.gpu.trtllm.signatures import differences

PROMPT = [100 + (number * number * 31 + number * 7) % 800 for number in range(70)]
TRANSCEIVER_TIMEOUT_S = 20.0
ANSWERS = "ANSWERS "  # begins the line of output that has them
_APPLIED = "applied"
_IGNORED = "ignored"
# The first candidates of 1.3 whose PyTorch sampler applies them, as the adapter has it.
_PENALTIES_SINCE = 24
_SEED_SINCE = 27
# Two tokens that are chosen by turns if and only if the one that was chosen is penalized.
_FAVORED = {9: 1000.0, 11: 999.0}
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What TensorRT-LLM does, beside what the adapter assumes of this release."""

    question: str
    assumed: str
    found: str

    @property
    def is_as_assumed(self) -> bool:
        return self.found == self.assumed


class Probes:
    """One LLM and the questions to it."""

    def __init__(
        self, package: Any, llm: Any, release: ApiManifest, *, vocab_size: int, kv_timeout_s: float
    ) -> None:
        self._package = package
        self._llm = llm
        self._release = release
        self._vocab_size = vocab_size
        self._kv_timeout_s = kv_timeout_s
        self._greedy: list[int] = []

    def _sampling(self, **more: Any) -> Any:
        values = {
            "end_id": -1,
            "max_tokens": 24,
            "top_k": 1,
            "detokenize": False,
            "include_stop_str_in_output": True,
        }
        return self._package.SamplingParams(**{**values, **more})

    async def _ask(self, **sampling: Any) -> Any:
        return (
            await self._llm.generate_async(
                inputs=PROMPT, sampling_params=self._sampling(**sampling)
            )
        ).outputs[0]

    async def _ids(self, **sampling: Any) -> list[int]:
        return list((await self._ask(**sampling)).token_ids)

    async def greedy(self) -> str:
        self._greedy = await self._ids()
        return "the same" if self._greedy == await self._ids() else "not the same"

    async def seed(self) -> str:
        sampled = {"temperature": 1.0, "top_k": None, "top_p": 1.0, "seed": 7}
        answers = [await self._ids(**sampled) for _ in range(3)]
        return _APPLIED if answers[0] == answers[1] == answers[2] else _IGNORED

    async def min_tokens(self) -> str:
        end = self._greedy[2]  # ends at once unless it is held back
        return _APPLIED if len(await self._ids(end_id=end, min_tokens=12)) >= 12 else _IGNORED

    async def min_p(self) -> str:
        sampled = await self._ids(temperature=1.0, top_k=None, top_p=1.0, min_p=1.0)
        return _APPLIED if sampled == self._greedy else _IGNORED

    async def penalties(self) -> str:
        bias = torch.zeros(self._vocab_size, dtype=torch.float32)
        for token, value in _FAVORED.items():
            bias[token] = value
        plain = await self._ids(embedding_bias=bias)
        applied = [
            name
            for name in _PENALTIES
            if await self._ids(embedding_bias=bias, **{name: 1.9}) != plain
        ]
        return (
            _IGNORED
            if not applied
            else _APPLIED
            if len(applied) == len(_PENALTIES)
            else f"only {', '.join(applied)}"
        )

    async def stop_tokens_with_ignore_eos(self) -> str:
        stopped = await self._ids(ignore_eos=True, stop_token_ids=[self._greedy[4]])
        return "kept" if len(stopped) < len(self._greedy) else "dropped"

    async def last_stop_token(self) -> str:
        position = self._greedy.index(self._greedy[4])
        output = await self._ask(max_tokens=position + 1, stop_token_ids=[self._greedy[4]])
        return str(output.finish_reason)

    async def structural_tag(self) -> str:
        tag = json.dumps({"format": {"type": "json_schema", "json_schema": {"type": "boolean"}}})
        guided = self._package.llmapi.GuidedDecodingParams(structural_tag=tag)
        await self._ask(guided_decoding=guided)
        return "accepted"

    async def _context(self) -> Any:
        params = {"request_type": "context_only"}
        if self._release.presence("DisaggregatedParams", "disagg_request_id") is Presence.PRESENT:
            params["disagg_request_id"] = 1 << 62 | time.monotonic_ns() & ((1 << 40) - 1)  # type: ignore[assignment]
        disagg = self._package.DisaggregatedParams(**params)
        result = self._llm.generate_async(
            inputs=PROMPT, sampling_params=self._sampling(), disaggregated_params=disagg
        )
        return await result

    async def context_answer(self) -> str:
        answered = (await self._context()).outputs[0].disaggregated_params
        names = (
            "first_gen_tokens",
            "ctx_request_id",
            "opaque_state",
            "ctx_info_endpoint",
            "disagg_request_id",
        )
        return ", ".join(name for name in names if getattr(answered, name, None))

    async def kv_after_abort(self) -> str:
        """What frees the KV of a context-only call that is not fetched."""
        before = await self._used_blocks()
        (await self._context()).abort()
        if await self._used_blocks() <= before:
            return "freed by the abort"
        deadline = time.monotonic() + 3 * self._kv_timeout_s
        while time.monotonic() < deadline:
            await asyncio.sleep(self._kv_timeout_s / 10)
            if await self._used_blocks() <= before:
                return "freed by kv_transfer_timeout_ms"
        return "never freed"

    async def _used_blocks(self) -> int:
        """After one more short request, as an idle executor reports nothing."""
        await self._ids(max_tokens=2)
        await asyncio.sleep(0.2)
        if self._release.name.startswith("1.1"):  # whose get_stats loses what it reads
            rows = [row async for row in self._llm.get_stats_async(timeout=0.5)]
        else:
            rows = await asyncio.to_thread(self._llm.get_stats, timeout=1.0)
        return int(rows[-1]["kvCacheStats"]["usedNumBlocks"])

    async def statistics_when_idle(self) -> str:
        for _ in range(2):  # the first call takes what is left
            try:
                rows = await asyncio.to_thread(self._llm.get_stats, timeout=0.5)
            except Exception as exc:  # noqa: BLE001 - its class is the answer
                return type(exc).__name__
        return f"{len(rows)} rows"


def has_python_transceiver(version: str) -> bool:
    """True from 1.3 on."""
    return not _is_before(version, 0)


def _is_before(version: str, candidate: int) -> bool:
    """True for releases before this candidate of 1.3."""
    line, _, number = version.partition("+")[0].partition("rc")
    minor = tuple(int(part) for part in line.split(".")[:2])
    return minor < (1, 3) or (minor == (1, 3) and bool(number) and int(number) < candidate)


def assumptions(version: str, runtime: str) -> Mapping[str, str]:
    """Return the answers that the adapter assumes, by the name of the question.

    Args:
        version: the installed release.
        runtime: the cache transceiver, CPP or PYTHON.
    """
    old = _is_before(version, 0)
    line = tuple(int(part) for part in version.split(".")[:2])
    place = "ctx_info_endpoint" if runtime == "PYTHON" else "opaque_state"
    answers = {
        "greedy": "the same",
        "seed": _IGNORED if _is_before(version, _SEED_SINCE) else _APPLIED,
        "min_tokens": _IGNORED if _is_before(version, _PENALTIES_SINCE) else _APPLIED,
        "min_p": _IGNORED if _is_before(version, _PENALTIES_SINCE) else _APPLIED,
        "penalties": _IGNORED if _is_before(version, _PENALTIES_SINCE) else _APPLIED,
        "stop_tokens_with_ignore_eos": "kept" if old else "dropped",
        "last_stop_token": "length",
        "context_answer": f"first_gen_tokens, ctx_request_id, {place}"
        + ("" if old else ", disagg_request_id"),
        "kv_after_abort": "never freed" if line < (1, 2) else "freed by kv_transfer_timeout_ms",
        "statistics_when_idle": "TypeError" if line < (1, 2) else "0 rows",
    }
    # which the adapter sends from 1.2 on
    return answers if line < (1, 2) else answers | {"structural_tag": "accepted"}


async def _answers(probes: Probes, assumed: Mapping[str, str]) -> list[Answer]:
    answers = []
    for question, expected in assumed.items():
        ask: Callable[[], Awaitable[str]] = getattr(probes, question)
        try:
            async with asyncio.timeout(300.0):
                found = await ask()
        except Exception as exc:  # noqa: BLE001 - the other questions are asked all the same
            found = f"{type(exc).__name__}: {exc}"
        answers.append(Answer(question=question, assumed=expected, found=found))
    return answers


def run(
    package: Any, model: str, *, runtime: str, kv_timeout_s: float = TRANSCEIVER_TIMEOUT_S
) -> list[Answer]:
    """Build an LLM on a thread, as a worker does, and ask it everything.

    Args:
        package: `tensorrt_llm`.
        model: folder of the model.
        runtime: the cache transceiver, CPP (over UCX) or PYTHON (over NIXL, from 1.3 on).
        kv_timeout_s: kv_transfer_timeout_ms, in seconds.
    """
    version = str(package.__version__)
    release = release_for(version)
    transceiver: dict[str, Any] = {
        "backend": "NIXL" if runtime == "PYTHON" else "UCX",
        "max_tokens_in_buffer": 2048,
    }
    if release.presence("CacheTransceiverConfig", "kv_transfer_timeout_ms") is Presence.PRESENT:
        transceiver["kv_transfer_timeout_ms"] = int(kv_timeout_s * 1000)
    if release.presence("CacheTransceiverConfig", "transceiver_runtime") is Presence.PRESENT:
        transceiver["transceiver_runtime"] = runtime
    arguments = {
        "model": model,
        "backend": "pytorch",
        "max_batch_size": 8,
        "max_num_tokens": 2048,
        "max_seq_len": 4096,
        "kv_cache_config": {"free_gpu_memory_fraction": 0.5, "enable_block_reuse": False},
        "cuda_graph_config": None,
        "disable_overlap_scheduler": True,
        "guided_decoding_backend": "xgrammar",
        "enable_iter_perf_stats": True,
        "cache_transceiver_config": transceiver,
    }
    built: list[Any] = []
    thread = threading.Thread(target=lambda: built.append(package.LLM(**arguments)))
    thread.start()
    thread.join()
    found = "works" if built else "fails"
    answers = [Answer(question="LLM built off the main thread", assumed="works", found=found)]
    llm = built[0] if built else package.LLM(**arguments)
    try:
        names = differences(package, release)
        answers.append(
            Answer(
                question="names and defaults",
                assumed="none differs",
                found="; ".join(names) or "none differs",
            )
        )
        vocab_size = int(
            json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        )
        probes = Probes(package, llm, release, vocab_size=vocab_size, kv_timeout_s=kv_timeout_s)
        return answers + asyncio.run(_answers(probes, assumptions(version, runtime)))
    finally:
        llm.shutdown()


if __name__ == "__main__":  # TensorRT-LLM starts the processes of its ranks from this module
    model, runtime = sys.argv[1:]
    found = run(importlib.import_module("tensorrt_llm"), model, runtime=runtime)
    rows = [[finding.question, finding.assumed, finding.found] for finding in found]
    os.write(1, f"\n{ANSWERS}{json.dumps(rows)}\n".encode())
