"""Find requests that end the workers which run them (queries of death), and refuse them.

A worker that dies takes all its requests with it, and nothing says which of them was the cause. The rules:

* A death is charged to the requests that ran on the worker. A request that is charged with MOST_DEATHS deaths is given
  up, so that no third worker ends by it.
* Most killers act soon after they begin. A request whose call had returned fewer than SETTLED_TOKENS tokens is
  therefore a prime suspect: it waits, for a bounded time, until it can be tried again on workers that run no other
  suspect. If its worker dies, too, this death is charged to prime suspects, and to suspects whose call failed at the
  same point as before. All other requests migrate at once, and are not charged.
* A death is forgotten if a later call of the request got much further, or if the worker works again: it was only cut
  off.

Requests like one that was given up are refused for REFUSED_S seconds, if it was the only suspect of its last death. If
there were several, most of them are innocent: only what is given up again within that time is refused.

This module does no I/O. One process has one memory of this kind, which other frontend processes don't share.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from dynamo_trtllm.errors import QueryOfDeath
from dynamo_trtllm.messages import GenerateRequest, encode
from dynamo_trtllm.observability.logging import short_id
from dynamo_trtllm.router.policy import WorkerSelection

log = logging.getLogger(__name__)

MOST_DEATHS: Final = 2  # with one, each crash of a worker would cost all its requests
# A prompt, a format or the first steps end a worker before this number of tokens. It takes a fraction of a second, for
# which other suspects wait.
SETTLED_TOKENS: Final = 8
# How long a suspect waits for workers without other suspects. Each trial takes a fraction of a second, and the restart
# of a worker with a small model some seconds.
TURN_WAIT_S: Final = 30.0
# A client that repeats a deadly request ends at most two workers of a process in this time, and a worker with a large
# model has long been restarted then. It is not longer because an innocent request may have been refused.
REFUSED_S: Final = 600.0
MOST_REFUSED: Final = 1024  # the oldest one is forgotten
_LOST_TOKENS: Final = 2  # tokens that a worker may have generated but not sent when it died
_MOST_DEAD: Final = 4096  # instances; the oldest one is forgotten

Key = tuple[str, bytes]
K = TypeVar("K")
V = TypeVar("V")


class Suspicion:
    """The deaths that one prompt of a client's request is charged with. Its choices share it."""

    __slots__ = ("deaths", "is_shared", "selection")

    def __init__(self, *, is_shared: bool = False) -> None:
        self.deaths: dict[int, int] = {}  # by instance id: tokens that the call had returned
        self.is_shared = is_shared  # by several choices
        # Workers of its latest attempt. Its choices run on the same ones: otherwise one request could end all workers
        # at once.
        self.selection: WorkerSelection | None = None


class Call:
    """The calls of one choice, one at a time."""

    __slots__ = ("instance_id", "is_after_death", "is_prime", "suspicion", "tried_on")

    def __init__(self, suspicion: Suspicion) -> None:
        self.suspicion = suspicion
        self.instance_id: int | None = None  # the worker that runs it
        self.is_after_death = False  # it began after the death of this worker was recorded
        self.tried_on: tuple[int, ...] = ()  # the workers of a suspect's attempt, until it has settled
        self.is_prime = False  # a death of one of these workers is charged to it alone

    def is_prime_on(self, instance_id: int) -> bool:
        """Return whether this is a prime suspect that is being tried on an instance."""
        return self.is_prime and instance_id in self.tried_on


class Suspects:
    """What runs on which worker, who is charged with deaths, and what is refused.

    Args:
        count: called with the outcome of a query of death: "given_up" or "refused".
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self, count: Callable[[str], None] = lambda outcome: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._count, self._clock = count, clock
        self._running: defaultdict[int, set[Call]] = defaultdict(set)  # by instance id
        self._trials: defaultdict[int, set[Call]] = defaultdict(set)  # by instance id: suspects that have not settled
        self._dead: dict[int, None] = {}  # instance ids, latest last
        # By instance id: the calls that it ran at its death and that have not failed yet.
        self._dying: dict[int, set[Call]] = {}
        self._has_prime: dict[int, bool] = {}  # by instance id, latest last: one of these calls was a prime suspect
        self._has_one_suspect: dict[int, bool] = {}  # by instance id, latest last: only one of them had a death before
        self._refused: dict[Key, float] = {}  # until when, latest last
        self._given_up: dict[Key, float] = {}  # until when a second time counts, latest last

    # --- what runs -------------------------------------------------------------------------------------

    def begin(self, call: Call, instance_id: int) -> None:
        """Note that a worker runs a call from now on. Without an `end` before, the last call succeeded."""
        self.succeeded(call)
        self.end(call)
        call.instance_id = instance_id
        call.is_after_death = instance_id in self._dead
        self._running[instance_id].add(call)

    def end(self, call: Call) -> None:
        """Note that no worker runs the call any more. Idempotent."""
        if call.instance_id is None:
            return
        _discard(self._running, call.instance_id, call)
        _discard(self._dying, call.instance_id, call)
        call.instance_id = None

    def succeeded(self, call: Call) -> None:
        """Note that the worker has returned a result. If it was recorded as dead before the call, it is not."""
        if call.instance_id is not None and call.is_after_death:
            self._dead.pop(call.instance_id, None)

    def begin_trial(self, call: Call, selection: WorkerSelection, *, is_prime: bool) -> None:
        """Note the workers of an attempt of a suspect. `is_prime`: it is suspected more than others."""
        prefill, decode = selection.prefill, selection.decode
        call.tried_on = (decode.id,) if prefill is None else (prefill.id, decode.id)
        call.is_prime = is_prime
        for instance_id in call.tried_on:
            self._trials[instance_id].add(call)

    def end_trial(self, call: Call) -> bool:
        """Note that a suspect has settled, or that its attempt has ended. Return whether one was tried. Idempotent."""
        tried_on, call.tried_on = call.tried_on, ()
        for instance_id in tried_on:
            _discard(self._trials, instance_id, call)
        return bool(tried_on)

    def tried_on(self, suspicion: Suspicion) -> frozenset[int]:
        """Return the workers on which other suspects are tried."""
        others = (
            instance_id
            for instance_id, calls in self._trials.items()
            if any(call.suspicion is not suspicion for call in calls)
        )
        return frozenset(others)

    # --- deaths ----------------------------------------------------------------------------------------

    def record_death(self, call: Call, request: GenerateRequest, num_tokens: int) -> QueryOfDeath | None:
        """Record that the worker of a call has died. Return an error if the request is given up.

        Args:
            call: the call that failed with it.
            request: what the client wants, for its likes.
            num_tokens: tokens that the call had returned.
        """
        dead, deaths = call.instance_id, call.suspicion.deaths
        if dead is None:
            return None
        if dead not in self._dead:
            self._note_dead(dead)
        is_charged = call in self._dying.get(dead, ()) and (
            not self._has_prime[dead] or call.is_prime_on(dead) or _is_same_point(num_tokens, deaths.values())
        )
        self.end(call)
        if not is_charged:
            return None  # another request explains the death, or the worker had died before this call
        got_further = [each for each, before in deaths.items() if num_tokens > 2 * before + SETTLED_TOKENS]
        revived = [each for each in deaths if each not in self._dead]
        for instance_id in (*got_further, *revived):
            deaths.pop(instance_id, None)
        deaths[dead] = num_tokens
        if len(deaths) < MOST_DEATHS:
            return None
        return self._give_up(request, list(deaths), is_only_suspect=self._has_one_suspect.get(dead, False))

    def _note_dead(self, instance_id: int) -> None:
        """Record a death, and which of the calls that the worker ran may explain it."""
        running = self._running[instance_id]
        primes = [call for call in running if call.is_prime_on(instance_id)]
        suspicions = {call.suspicion for call in primes or running if call.suspicion.deaths}
        self._dead[instance_id] = None
        self._dying[instance_id] = set(running)
        self._has_prime[instance_id] = bool(primes)
        self._has_one_suspect[instance_id] = len(suspicions) == 1
        _drop_oldest(self._dead, _MOST_DEAD)
        _drop_oldest(self._has_prime, _MOST_DEAD)
        _drop_oldest(self._has_one_suspect, _MOST_DEAD)

    def _give_up(self, request: GenerateRequest, instances: list[int], *, is_only_suspect: bool) -> QueryOfDeath:
        key, now = _key(request), self._clock()
        is_refused = is_only_suspect or self._given_up.get(key, now) > now
        for memory in (self._given_up, self._refused) if is_refused else (self._given_up,):
            memory.pop(key, None)
            memory[key] = now + REFUSED_S
            _drop_oldest(memory, MOST_REFUSED)
        self._count("given_up")
        names = " and ".join(f"{each:x}" for each in instances)
        log.error(
            "request %s given up: workers %s ended while they ran it%s",
            short_id(request.request_id),
            names,
            f"; its like is refused for {REFUSED_S:g} s" if is_refused else "",
        )
        return QueryOfDeath(
            f"{len(instances)} workers ended while they ran this request ({names}), so it is not tried on another one; "
            "change the request"
        )

    def check(self, request: GenerateRequest) -> None:
        """Raise QueryOfDeath if a request with the same prompt and format was given up a short time ago."""
        if not self._refused:
            return
        now = self._clock()
        while self._refused and next(iter(self._refused.values())) <= now:
            del self._refused[next(iter(self._refused))]
        until = self._refused.get(_key(request)) if self._refused else None
        if until is None:
            return
        self._count("refused")
        raise QueryOfDeath(
            "workers ended while they ran a request with this prompt and format, so it is refused for "
            f"{until - now:.0f} more seconds; change the request"
        )


def _is_same_point(num_tokens: int, before: Iterable[int]) -> bool:
    """Return whether a suspect's call failed after as many tokens as one before."""
    return any(abs(num_tokens - other) <= _LOST_TOKENS for other in before)


def _key(request: GenerateRequest) -> Key:
    """Return what requests have in common that end workers for the same reason: model, prompt and output format."""
    digest = hashlib.blake2b(request.token_ids.tobytes(), digest_size=16)
    digest.update(encode(request.sampling.guided))
    return request.model, digest.digest()


def _discard(calls_of: dict[int, set[Call]], instance_id: int, call: Call) -> None:
    calls = calls_of.get(instance_id)
    if calls is not None:
        calls.discard(call)
        if not calls:
            del calls_of[instance_id]


def _drop_oldest(latest: dict[K, V], most: int) -> None:
    while len(latest) > most:
        del latest[next(iter(latest))]
