"""Token counters of clients: what is taken off for cached or cancelled prompts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dynamo_trtllm.frontend.requests.token_counters import (
    UPDATE_S,
    Client,
    CountedRequest,
    TokenCounters,
)
from dynamo_trtllm.protocol.messages import ClientShare
from tests.kit.admission import Clock

ALICE = Client("alice")
BOB = Client("bob")
PROMPT_TOKENS = 8192


class Counted:
    """Token counters, and requests whose prompts workers may find in their caches."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.counters = TokenCounters(self.clock)
        self.cached_tokens = 0

    def begin(self, client: Client) -> CountedRequest:
        return self.counters.begin(
            client, self.share(client), PROMPT_TOKENS, lambda: -self.cached_tokens
        )

    def share(self, client: Client) -> ClientShare:
        return self.counters.share(self.counters.counter(client))

    def find_cached(self, tokens: int) -> None:
        """Let workers report that they had so many tokens of each prompt."""
        self.cached_tokens = tokens
        self.clock.now += 2 * UPDATE_S
        assert self.counters.update()


def take_off_cached(counted: Counted, requests: list[CountedRequest]) -> None:
    counted.find_cached(8000)


def cancel(counted: Counted, requests: list[CountedRequest]) -> None:
    for request in requests:
        request.cancel()


@pytest.mark.parametrize("take_off", [take_off_cached, cancel])
def test_no_client_is_behind_itself(
    take_off: Callable[[Counted, list[CountedRequest]], None],
) -> None:
    """The third request begins with a lower counter than the second one did."""
    counted = Counted()
    take_off(counted, [counted.begin(ALICE) for _ in range(2)])
    assert counted.share(ALICE) is ClientShare.EVEN


def test_client_is_not_behind_itself_at_another_frontend() -> None:
    counted = Counted()
    for _ in range(2):
        counted.begin(ALICE)
    counted.counters.note_others(["alice"], has_below=False)
    counted.find_cached(8000)
    assert counted.share(ALICE) is ClientShare.EVEN


def test_client_is_compared_with_what_others_really_got() -> None:
    counted = Counted()
    for _ in range(2):
        counted.begin(ALICE)
    assert counted.share(BOB) is ClientShare.BELOW
    # Workers had nearly all of these prompts, so Alice got no more than Bob.
    counted.find_cached(8000)
    assert counted.share(BOB) is ClientShare.EVEN
