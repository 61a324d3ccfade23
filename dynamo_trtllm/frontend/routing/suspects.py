"""Find requests that end the workers which run them (queries of death), and reject them.

When a worker dies, all its requests fail, and nothing shows which of them was the cause.

Definitions:

* charge: a death is charged to requests that ran on the worker, or whose KV was being read from it.
* point of a death: the progress of a charged request when the worker died, counted in tokens of the
  failed call and in tokens of the whole answer. A query of death ends each worker at the same
  point.
* suspect: a request with a charge that is not explained (rule 5) and not dropped (rules 1 and 8).
* settled: a suspect has settled when its call has SETTLED_TOKENS tokens more than at the point, or
  MAX_UNSETTLED_TOKENS tokens. From then on, other suspects may be tried on its worker.
* prime suspect: a suspect whose call had fewer than SETTLED_TOKENS tokens when its worker died, or
  that has two charges which are neither explained nor dropped. Most queries of death end a worker
  soon after they begin.
* new request: a request that is no suspect, and whose call has fewer than SETTLED_TOKENS tokens.

Rules:

1. A charge counts until the call has SETTLED_TOKENS tokens more than at the point. It is then
   dropped at the next death. So a suspect that settles after MAX_UNSETTLED_TOKENS tokens, which may
   be before the point, keeps its charge: if it is a query of death, it ends its new worker only at
   the point.
2. A prime suspect waits, for a bounded time, for workers on which all other suspects have settled.
   It is tried on these. All other requests migrate at once.
3. When a worker with suspects dies, the requests that this death singles out are given up, so that
   they end no third worker. `_single_out` has the cases.
4. A death that singles out no request may have another cause than the death before. It is charged
   to all requests on the worker. A death that singles out some requests is charged to these and to
   the new requests on the worker. If new requests were not charged, a second query of death that is
   new among suspects of a first one would never be found: each death would give up one of the
   suspects instead.
5. If all requests that a death singles out were at the point of an earlier death, the new death is
   explained, and so is each earlier death that is charged to every one of these requests.
6. A request whose charges are all explained may still be another query of death. It is singled out
   like a suspect if it is new and at the point of one of these deaths. But if a new request without
   any charge runs on the same worker, that request may be the cause, and rule 6 does not apply.
7. After a request was given up, requests with the same model, prompt and format are rejected for
   REJECTED_S seconds. If its last death gave up several requests, most of them are innocent: they
   are rejected only after one of them is given up again within that time, and none was completed
   in between.
8. A charge is dropped when the worker works again: then the worker had only lost its connection.
9. A request is given up when its MAX_DEATHS-th worker dies and it is at the point of an earlier
   death, even if these deaths are explained: overlapping queries of death explain each other's
   deaths. It may be innocent, so it explains no death, and requests like it are rejected as if its
   last death had given up several.

Example: worker 1 runs the requests A, B and C. A and B have begun, C has 50 tokens. Worker 1 dies,
and all three are suspects. C migrates to worker 2 at once, and settles there after 58 tokens. A and
B are prime suspects. A is tried on worker 2 next, where C has settled, while B waits. Worker 2 dies
when A has begun, at the point of the first death: A is given up, and both deaths are explained. So
B is no suspect any more. C has lost its charge, and migrates again.

This module does no I/O. Frontend processes do not share what they know of suspects.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from dynamo_trtllm.frontend.routing.pairs import WorkerSelection
from dynamo_trtllm.observability.logging import short_id
from dynamo_trtllm.protocol.errors import QueryOfDeath
from dynamo_trtllm.protocol.messages import GenerateRequest, encode

log = logging.getLogger(__name__)

# A request whose prompt, format or first steps end workers does so before it has this many tokens.
# Until then, other suspects wait, for a fraction of a second.
SETTLED_TOKENS: Final = 8
# A suspect settles with this many tokens, even if its worker died later. So other suspects need not
# wait for seconds.
MAX_UNSETTLED_TOKENS: Final = 64
# For how long requests like one that was given up are rejected. It is long enough to restart
# workers with a large model before a repeated query of death ends two more of them. It is not
# longer, because the rejected requests may be innocent.
REJECTED_S: Final = 600.0
MAX_REJECTED: Final = 1024  # limit of the remembered requests; the oldest one is dropped
# The number of deaths of rule 9. With 3, innocent requests beside two queries of death in a row
# would be given up, too.
MAX_DEATHS: Final = 4
_LOST_TOKENS: Final = 2  # tokens that a worker may have generated, but not sent, when it died
_MAX_DEATHS_KEPT: Final = 4096  # limit of the remembered deaths; the oldest one is dropped

Key = tuple[str, bytes]
K = TypeVar("K")
V = TypeVar("V")


class RequestProgress(NamedTuple):
    """How far a request is, in tokens."""

    call_tokens: int  # the tokens that the current call has returned
    answer_tokens: int  # the tokens that all calls of the request have returned


class Death:
    """The death of an instance, and what is known of its cause."""

    __slots__ = (
        "charged",
        "exhausted",
        "given_up",
        "instance_id",
        "is_explained",
        "is_revoked",
    )

    def __init__(
        self,
        instance_id: int,
        charged: set[TrackedCall],
        given_up: set[Suspicion],
        exhausted: set[Suspicion],
    ) -> None:
        self.instance_id = instance_id
        # The calls to which this death is charged, until each of them is found to have failed.
        self.charged = charged
        # The suspicions of the requests that this death singles out. They are given up.
        self.given_up = given_up
        # The suspicions of the requests that are given up because they had MAX_DEATHS.
        self.exhausted = exhausted
        self.is_explained = False  # a request that was given up has probably caused this death
        self.is_revoked = False  # the instance works again


class Suspicion:
    """The deaths with which one prompt of a request is charged.

    All choices of the prompt share this object. In a request with very many prompts, several
    prompts share it (see `share_suspicions`).
    """

    __slots__ = ("deaths", "is_shared", "noted_keys", "num_prompts", "selection")

    def __init__(self, *, is_shared: bool = False) -> None:
        # Death -> its point: the progress of the request at that time.
        self.deaths: dict[Death, RequestProgress] = {}
        # How many prompts share this object; 0: `share_suspicions` was not called, because the
        # request has only one choice.
        self.num_prompts = 0
        # The keys of the prompts that are noted as given up.
        self.noted_keys: set[Key] = set()
        self.is_shared = is_shared  # several choices may share this object
        # The workers of the latest attempt. All choices run on these workers: otherwise one request
        # could end all workers at once.
        self.selection: WorkerSelection | None = None

    def unexplained_deaths(self) -> set[Death]:
        """Return the deaths that make the request a suspect."""
        return {death for death in self.deaths if not death.is_explained and not death.is_revoked}

    def tokens_to_settle(self) -> int:
        """Return the number of tokens with which a call settles; 0 if the request is no suspect."""
        unexplained = self.unexplained_deaths()
        if not unexplained:
            return 0
        latest_point = max(self.deaths[death].call_tokens for death in unexplained)
        return min(latest_point + SETTLED_TOKENS, MAX_UNSETTLED_TOKENS)

    def drop_past(self, now: RequestProgress) -> None:
        """Drop the deaths whose point a call has passed, and deaths of workers that work again."""
        for death, point in list(self.deaths.items()):
            has_passed = now.call_tokens >= point.call_tokens + SETTLED_TOKENS
            if has_passed or death.is_revoked:
                del self.deaths[death]


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
        "trial_workers",
    )

    def __init__(self, suspicion: Suspicion, progress: Callable[[], RequestProgress]) -> None:
        self.suspicion = suspicion
        self.progress = progress  # called when a worker has died
        self.instance_id: int | None = None  # the worker that runs the call
        self.kv_holder: int | None = None  # the prefill worker from which this worker reads the KV
        self.is_after_death = False  # the call began after a death of this worker was recorded
        # The workers on which the request is tried as a suspect, until it has settled.
        self.trial_workers: tuple[int, ...] = ()
        self.is_prime = False  # the request is tried as a prime suspect

    def uses(self, instance_id: int) -> bool:
        """Return whether an instance runs the call or holds its KV."""
        return instance_id in (self.instance_id, self.kv_holder)

    def is_new_and_unsuspected(self) -> bool:
        """Return whether the request is no suspect, and its call has just begun."""
        has_just_begun = self.progress().call_tokens < SETTLED_TOKENS
        return has_just_begun and not self.suspicion.unexplained_deaths()

    def is_at_earlier_death(self) -> bool:
        """Return whether the request is at the point at which it failed before."""
        now = self.progress()
        for point in self.suspicion.deaths.values():
            is_at_call_point = abs(now.call_tokens - point.call_tokens) <= _LOST_TOKENS
            is_at_answer_point = abs(now.answer_tokens - point.answer_tokens) <= _LOST_TOKENS
            if is_at_call_point or is_at_answer_point:
                return True
        return False

    def is_exhausted(self) -> bool:
        """Return whether the request is given up if its worker dies now, whatever the cause."""
        num_deaths = len(self.suspicion.deaths) + 1
        return num_deaths >= MAX_DEATHS and self.is_at_earlier_death()

    def is_prime_on(self, instance_id: int) -> bool:
        """Return whether the request is being tried on an instance as a prime suspect."""
        return self.is_prime and instance_id in self.trial_workers


class Suspects:
    """The running calls, the deaths with which requests are charged, and the rejected requests.

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
        # The calls of all workers. They are searched only when a worker dies.
        self._running: set[TrackedCall] = set()
        # The suspects that are tried on an instance and have not settled, by instance id.
        self._trials: defaultdict[int, set[TrackedCall]] = defaultdict(set)
        # The deaths by instance id. In this dictionary and the next two, the latest entry is last.
        self._deaths: dict[int, Death] = {}
        # When the rejection of a request ends.
        self._rejected: dict[Key, float] = {}
        # A request that is given up again before this time is rejected.
        self._given_up: dict[Key, float] = {}

    # --- running calls ----------------------------------------------------------------------------

    def begin(self, call: TrackedCall, instance_id: int, kv_holder: int | None = None) -> None:
        """Note that a worker runs a call from now on.

        If the object still has an earlier call, this one has succeeded: the decode call of a
        request follows its prefill call without a call of `end`.

        Args:
            call: the call.
            instance_id: the worker that runs it.
            kv_holder: the worker from which this worker reads the KV of the prompt.
        """
        if call.instance_id is not None:
            self.succeeded(call)
            self.end(call)
        call.instance_id = instance_id
        call.kv_holder = kv_holder
        call.is_after_death = instance_id in self._deaths
        self._running.add(call)

    def end(self, call: TrackedCall) -> None:
        """Note that no worker runs the call any more. Idempotent."""
        if call.instance_id is None:
            return
        self._running.discard(call)
        self._forget_charge(call, call.instance_id)
        self._forget_charge(call, call.kv_holder)
        call.instance_id = None
        call.kv_holder = None

    def _forget_charge(self, call: TrackedCall, instance_id: int | None) -> None:
        """Forget that the death of an instance is charged to a call: the call has ended."""
        if not self._deaths or instance_id is None:
            return
        death = self._deaths.get(instance_id)
        if death is not None:
            death.charged.discard(call)

    def kv_arrived(self, call: TrackedCall) -> None:
        """Note that the worker of a call has read the KV, and succeeds."""
        self.succeeded(call)
        self._forget_charge(call, call.kv_holder)
        call.kv_holder = None

    def succeeded(self, call: TrackedCall) -> None:
        """Note that the worker has returned a result.

        If a death of the worker was recorded before the call began, the worker works again.
        """
        if call.instance_id is not None and call.is_after_death:
            death = self._deaths.pop(call.instance_id, None)
            if death is not None:
                death.is_revoked = True

    def begin_trial(self, call: TrackedCall, selection: WorkerSelection, *, is_prime: bool) -> None:
        """Note the workers on which a suspect is tried. `is_prime`: as a prime suspect."""
        prefill = selection.prefill
        decode = selection.decode
        call.trial_workers = (decode.id,) if prefill is None else (prefill.id, decode.id)
        call.is_prime = is_prime
        for instance_id in call.trial_workers:
            self._trials[instance_id].add(call)

    def end_trial(self, call: TrackedCall) -> None:
        """Note that a suspect has settled, or that its attempt has ended. Idempotent."""
        for instance_id in call.trial_workers:
            trials = self._trials[instance_id]
            trials.discard(call)
            if not trials:
                del self._trials[instance_id]
        call.trial_workers = ()

    def workers_of_other_trials(self, suspicion: Suspicion) -> frozenset[int]:
        """Return the workers on which other suspects are tried."""
        instance_ids = set()
        for instance_id, calls in self._trials.items():
            others = {call.suspicion for call in calls} - {suspicion}
            if any(other.unexplained_deaths() for other in others):
                instance_ids.add(instance_id)
        return frozenset(instance_ids)

    # --- deaths -----------------------------------------------------------------------------------

    def record_death(
        self, call: TrackedCall, dead: int, request: GenerateRequest
    ) -> QueryOfDeath | None:
        """Record that a call failed because an instance died.

        Return an error if the request is given up.

        Args:
            call: the call that failed.
            dead: the instance that ran it, or that held its KV.
            request: the request of the client. Similar requests may be rejected later.
        """
        if not call.uses(dead):
            return None
        death = self._deaths.get(dead)
        if death is None:
            death = self._note_death(dead)
        is_charged = call in death.charged
        self.end(call)
        if not is_charged:
            return None
        suspicion = call.suspicion
        suspicion.deaths[death] = call.progress()
        is_singled_out = suspicion in death.given_up
        if not is_singled_out and suspicion not in death.exhausted:
            return None
        names = " and ".join(f"{earlier.instance_id:x}" for earlier in suspicion.deaths)
        # Another choice of the prompt may have been given up before.
        key = _key(request)
        if key not in suspicion.noted_keys:
            is_reported = bool(suspicion.noted_keys)
            suspicion.noted_keys.add(key)
            is_only_one = is_singled_out and len(death.given_up) == 1
            is_certain = is_only_one and suspicion.num_prompts <= 1
            is_rejected = self._note_given_up(key, is_certain=is_certain)
            if not is_reported:
                self._report_given_up(request, names, is_rejected=is_rejected)
        return QueryOfDeath(
            f"{len(suspicion.deaths)} workers ended while they ran this request ({names}), so it is"
            " not tried on another one; change the request"
        )

    def is_explained(self, dead: int) -> bool:
        """Return whether a request was given up that has probably caused the death of an instance.

        The other requests on it are then innocent.
        """
        death = self._deaths.get(dead)
        return death is not None and death.is_explained

    def _note_death(self, instance_id: int) -> Death:
        """Record a death, and charge it to calls that ran on the worker."""
        running = {call for call in self._running if call.uses(instance_id)}
        for call in running:
            call.suspicion.drop_past(call.progress())
        new = {call for call in running if call.is_new_and_unsuspected()}
        singled_out = self._single_out(instance_id, running, new)
        given_up = {call.suspicion for call in singled_out}
        charged = running
        if given_up:
            charged = new | {call for call in running if call.suspicion in given_up}
        exhausted = {call for call in running if call.is_exhausted()}
        charged = charged | exhausted
        death = Death(instance_id, charged, given_up, {call.suspicion for call in exhausted})
        if given_up and all(call.is_at_earlier_death() for call in singled_out):
            # One of them has caused the earlier deaths that all of them are charged with.
            shared = set.intersection(*(suspicion.unexplained_deaths() for suspicion in given_up))
            for explained in (death, *shared):
                explained.is_explained = True
        self._deaths[instance_id] = death
        _drop_oldest(self._deaths, _MAX_DEATHS_KEPT)
        return death

    def _single_out(
        self, instance_id: int, running: set[TrackedCall], new: set[TrackedCall]
    ) -> set[TrackedCall]:
        """Return the calls that are given up because an instance died; maybe none.

        Args:
            instance_id: the instance.
            running: the calls that it ran.
            new: the running calls that are no suspects and have just begun. They may have charges
                that are explained.
        """
        suspects = {call for call in running if call.suspicion.unexplained_deaths()}
        prime_suspects = {call for call in suspects if call.is_prime_on(instance_id)}
        # Case 1: requests that are tried as prime suspects, at the point of an earlier death.
        prime_at_point = {call for call in prime_suspects if call.is_at_earlier_death()}
        if prime_at_point:
            return prime_at_point
        # Case 2: other suspects at such a point, and new requests at the point of an explained one.
        candidates = suspects
        # Where a new request without a charge may be the cause, other new ones are no candidates.
        if all(call.suspicion.deaths for call in new):
            candidates = suspects | new
        at_point = {call for call in candidates if call.is_at_earlier_death()}
        if at_point:
            return at_point
        # Case 3: all that are tried as prime suspects.
        if prime_suspects:
            return prime_suspects
        # Case 4: the only suspect, at whatever point, if no new request may be the cause. A third
        # worker is not risked, although the request may be innocent.
        is_only_suspect = len({call.suspicion for call in suspects}) == 1 and not new
        return suspects if is_only_suspect else set()

    def _note_given_up(self, key: Key, *, is_certain: bool) -> bool:
        """Note that a request is given up.

        Reject similar requests if this one is probably the cause. Return whether they are rejected.
        """
        now = self._clock()
        given_up_until = self._given_up.get(key)
        is_repeated = given_up_until is not None and given_up_until > now
        is_rejected = is_certain or is_repeated
        self._remember(self._given_up, key, now)
        if is_rejected:
            self._remember(self._rejected, key, now)
        return is_rejected

    def _report_given_up(self, request: GenerateRequest, names: str, *, is_rejected: bool) -> None:
        """Count and log that a request is given up."""
        self._count("given_up")
        consequence = f"; its prompt is rejected for {REJECTED_S:g} s" if is_rejected else ""
        log.error(
            "request %s given up: workers %s ended while they ran it%s",
            short_id(request.request_id),
            names,
            consequence,
        )

    @staticmethod
    def _remember(expiry_of: dict[Key, float], key: Key, now: float) -> None:
        """Add a key as the latest one, or renew it."""
        expiry_of.pop(key, None)
        expiry_of[key] = now + REJECTED_S
        _drop_oldest(expiry_of, MAX_REJECTED)

    def completed(self, request: GenerateRequest) -> None:
        """Note that a request was completed: requests like it are probably innocent."""
        # Without an entry, no time is spent on the digest.
        if self._given_up:
            self._given_up.pop(_key(request), None)

    def check(self, request: GenerateRequest) -> None:
        """Raise QueryOfDeath if requests with this model, prompt and format are rejected."""
        # Without an entry, no time is spent on the digest.
        if not self._rejected:
            return
        now = self._clock()
        while self._rejected:
            oldest = next(iter(self._rejected))
            if self._rejected[oldest] > now:
                break
            del self._rejected[oldest]
        until = self._rejected.get(_key(request))
        if until is None:
            return
        self._count("rejected")
        raise QueryOfDeath(
            "workers ended while they ran a request with this prompt and format, so it is rejected"
            f" for {until - now:.0f} more seconds; change the request"
        )


def _key(request: GenerateRequest) -> Key:
    """Return the key of all requests with the same model, prompt and output format."""
    digest = hashlib.blake2b(request.token_ids.tobytes(), digest_size=16)
    digest.update(encode(request.sampling.guided))
    return request.model, digest.digest()


def _drop_oldest(entries: dict[K, V], max_entries: int) -> None:
    """Keep the latest `max_entries` entries, which are the last ones."""
    while len(entries) > max_entries:
        del entries[next(iter(entries))]
