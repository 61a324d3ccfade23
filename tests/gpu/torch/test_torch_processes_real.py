"""The torch engine as real processes, prefill on one GPU and decode on another: parity,
cancellation, kill -9.
"""

from __future__ import annotations

import random
import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import httpx
import pytest

from tests.gpu.torch.site import AGGREGATED, OUTPUT_TOKENS, PAIR, Pair, body_of, greedy, prompt_of
from tests.kit.cluster import events

LENGTHS = [1, 31, 32, 33, 127, 128, 129, 1000, 5000]
REQUESTS = 200
CANCELLED = 0.3


def test_log_shows_kv_on_gpu_over_nixl(pair: Pair) -> None:
    for worker in (pair.prefill, pair.decode):
        worker.wait_for(r"KV transfer over nixl/ucx: transfer buffer of \d+ MiB", 1)
        assert not any("pinned host memory" in line for line in worker.lines)
        assert any(f"ready on {pair.site.device}" in line for line in worker.lines)


def test_tokens_prefilled_on_another_gpu_equal_one_process(pair: Pair) -> None:
    with pair.cluster.client(120.0) as client:
        for length in LENGTHS:
            disaggregated, single = (
                greedy(client, model, prompt_of(length)) for model in (PAIR, AGGREGATED)
            )
            assert disaggregated.tokens == single.tokens, length
            assert disaggregated.logprobs == pytest.approx(single.logprobs, abs=1e-3), length
        different = {greedy(client, PAIR, prompt_of(129, seed)).logprobs for seed in range(4)}
        assert len(different) > 2  # or the comparison would say nothing
    pair.check_idle()


def test_stream_when_client_leaves_then_nothing_is_left(pair: Pair) -> None:
    for model in (PAIR, AGGREGATED):
        _leave_after(pair, body_of(model, prompt_of(300), max_tokens=1500, stream=True), 3)
    pair.check_idle()


def test_kv_of_200_requests_with_random_cancels_is_free(pair: Pair) -> None:
    chosen = random.Random(6)
    plan = [
        (chosen.randrange(1, 1500), chosen.random() < CANCELLED, chosen.random())
        for _ in range(REQUESTS)
    ]
    with ThreadPoolExecutor(12) as pool:
        ended = list(pool.map(lambda request: _one(pair, *request), plan))
    wanted = [0 if is_cancelled else OUTPUT_TOKENS for _, is_cancelled, _ in plan]
    assert [0 if count is None else count for count in ended] == wanted
    pair.check_idle()
    with pair.cluster.client(120.0) as client:
        assert greedy(client, PAIR, prompt_of(500)) == greedy(client, AGGREGATED, prompt_of(500))


def _one(pair: Pair, length: int, is_cancelled: bool, when: float) -> int | None:
    """The number of tokens; None: cancelled, before the first token or after some."""
    body = body_of(PAIR, prompt_of(length, seed=length))
    if is_cancelled and when < 0.5:
        try:
            # leaves while it is prefilled or moved
            with pair.cluster.client(0.001 + when / 5) as client:
                client.post("/v1/completions", json=body | {"max_tokens": 4000})
        except httpx.TimeoutException:
            return None
    elif is_cancelled:
        _leave_after(pair, body | {"stream": True, "max_tokens": 1000}, int(when * 20))
        return None
    with pair.cluster.client(120.0) as client:
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["completion_tokens"])


def _leave_after(pair: Pair, body: dict[str, Any], count: int) -> None:
    """So many events, or all: a model with dummy weights may generate only control tokens, which
    have no text.
    """
    with (
        pair.cluster.client(120.0) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        for _ in islice(events(answer.iter_lines()), count):
            pass


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_killed_worker_frees_all_and_a_new_one_serves(pair: Pair, side: str) -> None:
    with ThreadPoolExecutor(8) as pool, pair.cluster.client(120.0) as client:
        before = greedy(client, PAIR, prompt_of(700))
        body = body_of(PAIR, prompt_of(2000), max_tokens=200, stream=True)
        running = [pool.submit(_ends_somehow, pair, body) for _ in range(8)]
        if side == "decode":
            pair.decode.send(signal.SIGKILL)
            pair.start_decode()
        else:
            pair.prefill.send(signal.SIGKILL)
            pair.start_prefill()
        pair.until_serving()
        assert all(answer.result(timeout=200) for answer in running)
        assert greedy(client, PAIR, prompt_of(700)) == before
    pair.check_idle()


def _ends_somehow(pair: Pair, body: dict[str, Any]) -> bool:
    """With all tokens or a named error: a status, or an event of the stream."""
    with (
        pair.cluster.client(180.0) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        if answer.status_code != 200:
            answer.read()
            return bool(answer.json()["error"]["code"])
        arrived = 0
        for line in answer.iter_lines():
            if '"error"' in line:
                return True
            arrived += line.startswith("data: {")
        return arrived > 0
