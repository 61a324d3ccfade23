"""Find requests that end the workers which run them (queries of death), and refuse them.

When a worker dies, all its requests fail, and nothing shows which of them was the cause. The rules:

* A death is charged to requests that ran on the worker, or whose KV was being read from it. A
  request that is charged with a death is a suspect. It is given up when it is charged with
  MAX_DEATHS deaths, so that it ends no third worker.
* A query of death ends each worker at the same point: after as many tokens of a call, or after as
  many tokens of its answer. A suspect that gets SETTLED_TOKENS past this point is cleared of the
  charge, and has settled.
* Most queries of death end a worker soon after they begin. So a suspect whose call had returned
  fewer than SETTLED_TOKENS tokens is a prime suspect. It waits, for a bounded time, for workers on
  which all other suspects have settled, and is then tried on these. All other requests migrate at
  once.
* If prime suspects are tried on a worker that dies, the death is charged to them. Otherwise, it is
  charged to suspects that are at the point of a death before. If there are none, it is charged to
  all requests that ran on the worker.
* A death is also charged to new requests, which are no suspects and whose call had just begun.
  Otherwise, a query of death that meets suspects of another one would end as many workers as there
  are suspects, and not be charged.
* A charge is dropped, too, if the worker works again: then it had only lost its connection.

After a request was given up, requests with the same model, prompt and format are refused for
REFUSED_S seconds, if its last death was charged to no other request, apart from new ones.
Otherwise, most of those that were charged are innocent. Then they are refused only after one of
them is given up again within that time, and none was completed in between.

This module does no I/O. Frontend processes do not share what they know of suspects.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeVar

from dynamo_trtllm.frontend.routing.pairs import WorkerSelection
from dynamo_trtllm.observability.logging import short_id
from dynamo_trtllm.protocol.errors import QueryOfDeath
from dynamo_trtllm.protocol.messages import GenerateRequest, encode

log = logging.getLogger(__name__)

MAX_DEATHS: Final = 2  # with one, each crash of a worker would cost all its requests
# A request whose prompt, format or first steps end workers does so before it has this many tokens.
# Until then, other suspects wait, for a fraction of a second.
SETTLED_TOKENS: Final = 8
# A suspect that failed later settles now, so that others need not wait for seconds.
MAX_UNSETTLED_TOKENS: Final = 64
# Long enough to restart workers with a large model before a repeated query of death ends two more
# of them. Not longer, because the refused request may be innocent.
REFUSED_S: Final = 600.0
MAX_REFUSED: Final = 1024  # requests; the oldest one is dropped
_LOST_TOKENS: Final = 2  # that a worker may have generated but not sent when it died
_MAX_DEAD: Final = 4096  # instances; the oldest one is dropped

Key = tuple[str, bytes]
K = TypeVar("K")
V = TypeVar("V")


class RequestProgress(NamedTuple):
    """How far a request is, in tokens."""

    call: int  # returned by its call
    answer: int  # of its answer, by all calls


class Suspicion:
    """The deaths with which one prompt of a request is charged.

    The choices of the prompt share this object.
    """

    __slots__ = ("deaths", "is_given_up", "is_shared", "selection")

    def __init__(self, *, is_shared: bool = False) -> None:
        self.deaths: dict[int, RequestProgress] = {}  # by instance id
        self.is_given_up = False
        self.is_shared = is_shared  # by several choices
        # The workers of the latest attempt. All choices run on them: otherwise one request could
        # end all workers at once.
        self.selection: WorkerSelection | None = None

    def num_unsettled_tokens(self) -> int:
        """Return the number of tokens after which a call has settled: 0 if this is no suspect."""
        if not self.deaths:
            return 0
        past_all = max(death.call for death in self.deaths.values()) + SETTLED_TOKENS
        return min(past_all, MAX_UNSETTLED_TOKENS)

    def is_new(self, now: RequestProgress) -> bool:
        """Return whether the request is no suspect, and its call has just begun."""
        return not self.deaths and now.call < SETTLED_TOKENS

    def is_at_earlier_death(self, now: RequestProgress) -> bool:
        """Return whether the request is at the point at which it failed before."""
        for before in self.deaths.values():
            is_same_call = abs(now.call - before.call) <= _LOST_TOKENS
            is_same_answer = abs(now.answer - before.answer) <= _LOST_TOKENS
            if is_same_call or is_same_answer:
                return True
        return False

    def charge(self, dead: int, now: RequestProgress, is_dead: Callable[[int], bool]) -> None:
        """Add a death.

        Drop the deaths whose point the call had passed, and those of workers that work again.
        """
        for instance_id, before in list(self.deaths.items()):
            got_past = now.call >= before.call + SETTLED_TOKENS
            if got_past or not is_dead(instance_id):
                del self.deaths[instance_id]
        self.deaths[dead] = now


class TrackedCall:
    """The call of one choice that runs now.

    All calls are tracked: if their worker dies, some of them become suspects. The choice uses this
    object for its later calls, too.
    """

    __slots__ = (
        "instance_id",
        "is_after_death",
        "is_prime",
        "kv_holder",
        "progress",
        "suspicion",
        "tried_on",
    )

    def __init__(self, suspicion: Suspicion, progress: Callable[[], RequestProgress]) -> None:
        self.suspicion = suspicion
        self.progress = progress  # called when a worker has died
        self.instance_id: int | None = None  # the worker that runs it
        self.kv_holder: int | None = None  # the prefill worker from which that worker reads the KV
        self.is_after_death = False  # the call began after a death of this worker was recorded
        # The workers on which a suspect is tried, until it has settled.
        self.tried_on: tuple[int, ...] = ()
        self.is_prime = False  # the trial is that of a prime suspect

    def uses(self, instance_id: int) -> bool:
        """Return whether an instance runs the call or holds its KV."""
        return instance_id in (self.instance_id, self.kv_holder)

    def is_prime_on(self, instance_id: int) -> bool:
        """Return whether this is a prime suspect that is being tried on an instance."""
        return self.is_prime and instance_id in self.tried_on


class Suspects:
    """The running calls, the deaths with which requests are charged, and the refused requests.

    Args:
        count: called with the outcome of a query of death: "given_up" or "rejected".
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        count: Callable[[str], None] = lambda outcome: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count = count
        self._clock = clock
        self._running: set[TrackedCall] = set()  # of all workers: it is searched only when one dies
        # The next four have instance ids as keys, and those about deaths the latest death last.
        # Suspects that have not settled.
        self._trials: defaultdict[int, set[TrackedCall]] = defaultdict(set)
        self._dead: dict[int, None] = {}
        # Calls to which the death is charged and that have not failed yet.
        self._charged: dict[int, set[TrackedCall]] = {}
        self._is_certain: dict[int, bool] = {}  # one request probably caused the death
        # The times at which refusals expire, the latest last.
        self._refused: dict[Key, float] = {}
        # The times until which a request that is given up again is refused, the latest last.
        self._given_up: dict[Key, float] = {}

    # --- running calls ----------------------------------------------------------------------------

    def begin(self, call: TrackedCall, instance_id: int, kv_holder: int | None = None) -> None:
        """Note that a worker runs a call from now on.

        If the last call was not ended before, it has succeeded: that is how a prefill call, whose
        decode call follows, succeeds.

        Args:
            call: the call.
            instance_id: the worker that runs it.
            kv_holder: the worker from which it reads the KV of its prompt.
        """
        if call.instance_id is not None:
            self.succeeded(call)
            self.end(call)
        call.instance_id = instance_id
        call.kv_holder = kv_holder
        call.is_after_death = instance_id in self._dead
        self._running.add(call)

    def end(self, call: TrackedCall) -> None:
        """Note that no worker runs the call any more. Idempotent."""
        if call.instance_id is None:
            return
        self._running.discard(call)
        if self._charged:
            self._forget_charge(call, call.instance_id)
            self._forget_charge(call, call.kv_holder)
        call.instance_id = None
        call.kv_holder = None

    def _forget_charge(self, call: TrackedCall, instance_id: int | None) -> None:
        """Forget that the death of an instance is charged to a call: the call has ended."""
        if instance_id is not None:
            _discard(self._charged, instance_id, call)

    def kv_arrived(self, call: TrackedCall) -> None:
        """Note that the worker of a call has read the KV, and succeeds."""
        self.succeeded(call)
        if self._charged:
            self._forget_charge(call, call.kv_holder)
        call.kv_holder = None

    def succeeded(self, call: TrackedCall) -> None:
        """Note that the worker has returned a result.

        If its death was recorded before the call, it works again.
        """
        if call.instance_id is not None and call.is_after_death:
            self._dead.pop(call.instance_id, None)

    def begin_trial(self, call: TrackedCall, selection: WorkerSelection, *, is_prime: bool) -> None:
        """Note the workers on which a suspect is tried. `is_prime`: it is a prime suspect."""
        prefill = selection.prefill
        decode = selection.decode
        call.tried_on = (decode.id,) if prefill is None else (prefill.id, decode.id)
        call.is_prime = is_prime
        for instance_id in call.tried_on:
            self._trials[instance_id].add(call)

    def end_trial(self, call: TrackedCall) -> None:
        """Note that a suspect has settled, or that its attempt has ended. Idempotent."""
        for instance_id in call.tried_on:
            _discard(self._trials, instance_id, call)
        call.tried_on = ()

    def tried_on(self, suspicion: Suspicion) -> frozenset[int]:
        """Return the workers on which other suspects are tried."""
        others = (
            instance_id
            for instance_id, calls in self._trials.items()
            if any(call.suspicion is not suspicion for call in calls)
        )
        return frozenset(others)

    # --- deaths -----------------------------------------------------------------------------------

    def record_death(
        self, call: TrackedCall, dead: int, request: GenerateRequest
    ) -> QueryOfDeath | None:
        """Record that a call failed because an instance died.

        Return an error if the request is given up.

        Args:
            call: the call that failed.
            dead: the instance that ran it, or that held its KV.
            request: the request of the client, by which similar ones are found.
        """
        if not call.uses(dead):
            return None
        if dead not in self._dead:
            self._note_dead(dead)
        is_charged = call in self._charged.get(dead, ())
        self.end(call)
        if not is_charged:
            return None
        suspicion = call.suspicion
        suspicion.charge(dead, call.progress(), self._dead.__contains__)
        deaths = suspicion.deaths
        if len(deaths) < MAX_DEATHS:
            return None
        if not suspicion.is_given_up:  # else another choice of the prompt was given up before
            suspicion.is_given_up = True
            self._note_given_up(request, list(deaths), is_certain=self._is_certain.get(dead, False))
        return QueryOfDeath(
            f"{len(deaths)} workers ended while they ran this request ({_names(deaths)}), so it is"
            " not tried on another one; change the request"
        )

    def _note_dead(self, instance_id: int) -> None:
        """Record a death, and charge it to calls that ran on the worker."""
        running = {call for call in self._running if call.uses(instance_id)}
        likely = self._find_likely(instance_id, running)
        new = {call for call in running if call.suspicion.is_new(call.progress())}
        self._dead[instance_id] = None
        self._charged[instance_id] = likely | new
        self._is_certain[instance_id] = len({call.suspicion for call in likely}) == 1
        _drop_oldest(self._dead, _MAX_DEAD)
        _drop_oldest(self._is_certain, _MAX_DEAD)

    def _find_likely(self, instance_id: int, running: set[TrackedCall]) -> set[TrackedCall]:
        """Return the calls, of those that ran on an instance, that probably caused its death."""
        prime_suspects = {call for call in running if call.is_prime_on(instance_id)}
        if prime_suspects:
            return prime_suspects
        at_earlier_death = {
            call for call in running if call.suspicion.is_at_earlier_death(call.progress())
        }
        return at_earlier_death or running

    def _note_given_up(
        self, request: GenerateRequest, instances: list[int], *, is_certain: bool
    ) -> None:
        """Record that a request is given up. Refuse similar ones if it is probably the cause."""
        key = _key(request)
        now = self._clock()
        is_refused = is_certain or self._given_up.get(key, now) > now
        self._remember(self._given_up, key, now)
        if is_refused:
            self._remember(self._refused, key, now)
        self._count("given_up")
        log.error(
            "request %s given up: workers %s ended while they ran it%s",
            short_id(request.request_id),
            _names(instances),
            f"; its prompt is refused for {REFUSED_S:g} s" if is_refused else "",
        )

    @staticmethod
    def _remember(expiry_of: dict[Key, float], key: Key, now: float) -> None:
        """Add a key as the latest one, or renew it."""
        expiry_of.pop(key, None)
        expiry_of[key] = now + REFUSED_S
        _drop_oldest(expiry_of, MAX_REFUSED)

    def completed(self, request: GenerateRequest) -> None:
        """Note that a request was completed: those like it are probably innocent."""
        if self._given_up:  # else no digest is computed
            self._given_up.pop(_key(request), None)

    def check(self, request: GenerateRequest) -> None:
        """Raise QueryOfDeath if requests with this model, prompt and format are refused."""
        if not self._refused:
            return  # no digest is computed
        now = self._clock()
        while self._refused:
            oldest = next(iter(self._refused))
            if self._refused[oldest] > now:
                break
            del self._refused[oldest]
        until = self._refused.get(_key(request))
        if until is None:
            return
        self._count("rejected")
        raise QueryOfDeath(
            "workers ended while they ran a request with this prompt and format, so it is refused"
            f" for {until - now:.0f} more seconds; change the request"
        )


def _names(instances: Iterable[int]) -> str:
    return " and ".join(f"{instance_id:x}" for instance_id in instances)


def _key(request: GenerateRequest) -> Key:
    """Return the key of all requests with the same model, prompt and output format."""
    digest = hashlib.blake2b(request.token_ids.tobytes(), digest_size=16)
    digest.update(encode(request.sampling.guided))
    return request.model, digest.digest()


def _discard(calls_of: dict[int, set[TrackedCall]], instance_id: int, call: TrackedCall) -> None:
    """Remove a call from those of an instance, if it is there. Drop an entry without calls."""
    calls = calls_of.get(instance_id)
    if calls is None:
        return
    calls.discard(call)
    if not calls:
        del calls_of[instance_id]


def _drop_oldest(entries: dict[K, V], most: int) -> None:
    """Keep the latest `most` entries, which are the last ones."""
    while len(entries) > most:
        del entries[next(iter(entries))]
