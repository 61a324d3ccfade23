"""Starts this project's frontend, and prefill and decode workers with a simulated engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import orjson

from dynamo_trtllm.access.api_keys import ApiKey, digest_of, new_key
from dynamo_trtllm.access.keys_file import add_key

from .points import IDLE_STEP_S
from .stack import HOST, MODEL, Certificate

_KV_BLOCKS = 1 << 20
_SLOTS = 4096
_NO_LIMIT = 10**9  # limits are counted, but never reached


class LimitedKey(NamedTuple):
    """An API key with all limits."""

    text: str
    path: Path  # file of API keys


def write_key(folder: Path) -> LimitedKey:
    """Write a file with a new API key that has all limits."""
    text = new_key()
    path = folder / "keys.jsonl"
    key = ApiKey(
        name="benchmark",
        sha256=digest_of(text).hex(),
        requests_per_minute=_NO_LIMIT,
        tokens_per_minute=_NO_LIMIT,
        concurrent_generations=_NO_LIMIT,
    )
    add_key(path, key)
    return LimitedKey(text, path)


class Ours:
    """This project as a `Recipe`. Its engine makes one Harmony token per step and stream.

    By default, workers run a simulated library behind the runner that vLLM and TensorRT-LLM use;
    see `runner_worker`. With `uses_mock`, they run the mock engine, which commits without that
    runner have, too. `num_frontends` processes share the frontend's port.
    """

    python = sys.executable
    framing_tokens = 3  # <|channel|>final<|message|>

    def __init__(
        self,
        checkout: Path | None = None,
        *,
        uses_mock: bool = False,
        num_frontends: int = 1,
        key: LimitedKey | None = None,
        num_consoles: int = 0,
        certificate: Certificate | None = None,
    ) -> None:
        """Use this checkout.

        Args:
            checkout: folder with another commit to use instead.
            uses_mock: use the mock engine instead of the runner of library engines.
            num_frontends: number of frontend processes.
            key: API key that clients of the frontend need; None: they need none.
            num_consoles: open consoles, which get an event each second.
            certificate: TLS of the frontend; None: it has none.
        """
        self._worker_module = "dynamo_trtllm" if uses_mock else f"{__package__}.runner_worker"
        self.name = "ours" if checkout is None else "beside"
        if num_frontends > 1:
            self.name += f" x{num_frontends}"
        self.api_key = ""
        if key is not None:
            self.name += " with key"
            self.api_key = key.text
        self.num_consoles = num_consoles
        if num_consoles:
            self.name += f" with {num_consoles} consoles"
        self.certificate = certificate
        if certificate is not None:
            self.name += " with TLS"
        self._num_frontends = num_frontends
        self._key = key
        self._checkout = checkout

    def env(self, etcd: str, nats: str) -> Mapping[str, str]:
        servers = {"ETCD_ENDPOINTS": etcd, "NATS_SERVER": nats}
        if self._checkout is None:
            return servers
        # `python -m` looks in the working directory first, which may be this checkout
        return servers | {"PYTHONPATH": str(self._checkout), "PYTHONSAFEPATH": "1"}

    def frontend(self, port: int, pace_s: float) -> Sequence[str]:
        flags: list[str] = ["--workers", str(self._num_frontends)]
        if self._key is not None:
            flags += ["--api-keys-file", str(self._key.path)]
        if self.certificate is not None:
            flags += ["--tls-cert-file", str(self.certificate.certificate)]
            flags += ["--tls-key-file", str(self.certificate.key)]
        return (
            "-m",
            "dynamo_trtllm.frontend",
            "--http-host",
            HOST,
            "--http-port",
            str(port),
            *flags,
        )

    def worker(self, role: str, pace_s: float) -> Sequence[str]:
        # The prompt of an idle stream takes no time; only its decode worker waits
        step_s = 0.0 if pace_s == IDLE_STEP_S and role == "prefill" else pace_s
        engine = {"step_s": step_s, "max_batch_size": _SLOTS, "kv_cache_blocks": _KV_BLOCKS}
        engine["prefill_tokens_per_step"] = 1 << 20
        flags = ("--engine", "mock", "--model", MODEL, "--served-model-name", MODEL)
        arguments = ("--override-engine-args", orjson.dumps(engine).decode())
        return ("-m", self._worker_module, *flags, "--disaggregation-mode", role, *arguments)
