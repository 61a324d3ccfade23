"""Choose the path of a request by its predicted times: a pure function, without clocks and I/O.

There are up to four paths: a prefill worker and then a decode worker, or one worker that runs the
whole request: a decode, prefill or aggregated worker.

While an elastic worker generates tokens, its steps have few prompt tokens (`engines.chunk_size`).
So from the first stream on, its prompts take longer. Therefore:

* New streams go first to elastic workers that already have streams, as long as these workers have
  space and their gaps stay below _PACKED of the limit. Workers that get no prompts share streams
  evenly.
* An elastic worker without a share of decode calls runs a whole request only if there is no other
  path.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

from dynamo_trtllm.frontend.routing.pair_breakers import PairBreakers
from dynamo_trtllm.frontend.routing.pairs import pair_of
from dynamo_trtllm.frontend.routing.worker_forecast import WorkerForecast
from dynamo_trtllm.protocol.messages import Instance

# If the pressures of two workers or paths differ by less than this part, chance may choose either.
# So frontends with the same reports do not all choose the same worker.
_NEAR: Final = 0.1
# This is added to each pressure. So pressures far below it count as nearly equal.
_NEGLIGIBLE: Final = 0.01
# A first token that is predicted later than this part of its limit counts as missed, because times
# of first tokens are predicted with errors of about a tenth.
_TTFT_PART: Final = 0.9
# Up to this pressure, an elastic worker that has streams gets further streams before a worker
# without streams.
_PACKED: Final = 0.8
# How many decode workers are compared for a whole request: those whose parts come first.
_MAX_AGGREGATING_DECODES: Final = 2
_cached_tokens = attrgetter("cached_tokens")


class Path(StrEnum):
    """Which workers run the phases of a request. The values are labels of a metric."""

    PREFILL_DECODE = "prefill_decode"
    ON_DECODE = "aggregated_on_decode"
    ON_PREFILL = "aggregated_on_prefill"
    ON_AGGREGATED = "aggregated"


class SloLimits(NamedTuple):
    """The limits by which the path of a request is chosen, in seconds."""

    ttft_s: float  # time to first token of the request
    itl_s: float  # time between two tokens of the request
    # The time between two tokens of the requests that already run. Their limit stays the same even
    # if this request has a looser one.
    others_itl_s: float
    waited_s: float = 0.0  # how long the request has waited since it arrived

    def is_late(self, ttft_s: float) -> bool:
        """Return whether a time to first token counts as missed."""
        return ttft_s > _TTFT_PART * self.ttft_s


class ChosenPath(msgspec.Struct, frozen=True):  # created in a third of the time of a named tuple
    """A path, and what is predicted for it."""

    path: Path
    prefill: Instance | None  # None: `decode` runs the whole request
    decode: Instance
    cached_tokens: int  # tokens of the prompt that need not be computed
    ttft_s: float
    # The longest gap between two tokens of this request, or of a request that runs on its workers.
    gap_s: float
    num_missed: int  # how many requests miss a limit: this request, and those that it delays
    # The largest ratio of a predicted time to its limit. Above 1, a limit is missed.
    pressure: float
    # Other paths on which as few requests miss a limit are chosen before this one, because the
    # stream of this request would slow the prompts of its worker, or the worker has many streams.
    is_last_resort: bool = False

    @property
    def meets_slo(self) -> bool:
        """Return whether this request and the running requests keep their limits."""
        return self.num_missed == 0

    @property
    def outcome(self) -> str:
        """Return what is predicted for the limits: "met" or "missed"."""
        return "met" if self.meets_slo else "missed"


class _PathPart(msgspec.Struct, frozen=True):
    """What one worker adds to a path."""

    worker: WorkerForecast
    # How many requests miss a limit at this worker: this request, and those that it delays.
    num_missed: int
    # The pressure, with a random addition (`_blurred`), divided by the worker's share. Parts are
    # compared by this value.
    weighted_pressure: float
    # How many running requests of the worker miss a limit because of this request. `num_missed`
    # includes them.
    num_delayed: int
    gap_s: float
    first_token_s: float = 0.0
    is_last_resort: bool = False  # other workers are chosen before this one

    @property
    def misses(self) -> bool:
        """Return whether this request misses a limit at this worker."""
        return self.num_missed > self.num_delayed


# The sort key of parts: better parts come first.
_order_of_part = attrgetter("num_missed", "is_last_resort", "weighted_pressure")


def select_path(
    prefills: Sequence[WorkerForecast],
    decodes: Sequence[WorkerForecast],
    aggregated: Sequence[WorkerForecast],
    limits: SloLimits,
    *,
    breakers: PairBreakers,
    random: Callable[[], float],
) -> ChosenPath | None:
    """Choose the path and the workers of a request.

    A path meets the SLO if the first token is predicted within _TTFT_PART of the limit, and no gap
    between two tokens exceeds its limit: neither a gap of this request nor a gap of the requests
    that run on its workers. Of these paths, the one with the least pressure is chosen (see
    `ChosenPath`). A path whose stream would slow the prompts of its worker (`is_last_resort`) is
    chosen only if no other path meets the SLO.

    If no path meets the SLO, the path is chosen on which the fewest requests miss a limit. Of
    several such paths, those of last resort come last, and otherwise the least pressure decides.
    Streams that would miss their limit without this request do not count. The caller may reject the
    request instead.

    Workers and paths whose pressures differ by less than _NEAR are chosen by chance. An elastic
    worker may be in both roles, but is no pair with itself. Its pressure is divided by its share.

    Args:
        prefills: prefill workers, all of one pairing key.
        decodes: decode workers of the same key.
        aggregated: aggregated workers.
        limits: the limits of the request.
        breakers: the breakers of the pairs.
        random: returns numbers from 0 to 1.

    Returns:
        None: there is no path with a closed breaker.
    """
    paths: list[ChosenPath] = []
    prefill_parts = [_prefill_part(worker, limits, random) for worker in prefills]
    prefill_parts.sort(key=_order_of_part)
    decode_parts = [_decode_part(worker, limits, random) for worker in decodes]
    decode_parts.sort(key=_order_of_part)
    pair = _best_pair(prefill_parts, decode_parts, limits, breakers)
    if pair is not None:
        paths.append(pair)
        if pair.num_missed == 0:
            # The pair suffices, so no whole request needs a worker of last resort.
            decode_parts = [part for part in decode_parts if not part.is_last_resort]
    if breakers.any_open:
        prefills, decodes, aggregated = _may_aggregate(prefills, decodes, aggregated, breakers)
        decode_parts = [part for part in decode_parts if part.worker in decodes]
    paths += _paths_on_decode(decode_parts, limits)
    paths += _aggregated_paths(Path.ON_AGGREGATED, aggregated, limits)
    if not any(path.num_missed == 0 for path in paths):
        if paths:
            # Workers without a share of decode calls are needed only if there is no other path.
            prefills = [worker for worker in prefills if worker.takes_streams]
        paths += _aggregated_paths(Path.ON_PREFILL, prefills, limits, set(prefills))
    return min(paths, key=partial(_order_of_path, random), default=None)


def _order_of_path(random: Callable[[], float], path: ChosenPath) -> tuple[int, bool, float]:
    return path.num_missed, path.is_last_resort, _blurred(path.pressure, random)


def _blurred(pressure: float, random: Callable[[], float]) -> float:
    """Return the pressure, raised at random by up to _NEAR.

    So nearly equal pressures come in any order.
    """
    return (pressure + _NEGLIGIBLE) * (1.0 + _NEAR * random())


def _best_pair(
    prefills: Sequence[_PathPart],
    decodes: Sequence[_PathPart],
    limits: SloLimits,
    breakers: PairBreakers,
) -> ChosenPath | None:
    """Return the path over the best pair whose breaker is closed.

    None: there is no such pair.
    """
    if not prefills or not decodes:
        return None
    decodes = _with_transfers(prefills[0].first_token_s, decodes, limits)
    # The first parts are the best ones. An elastic worker may be the best one in both roles.
    is_same = prefills[0].worker.instance.id == decodes[0].worker.instance.id
    if not breakers.any_open and not is_same:
        return _pair_path(prefills[0], decodes[0], limits)
    pairs = [
        (prefill, decode)
        for prefill, decode in itertools.product(prefills, decodes)
        if prefill.worker.instance.id != decode.worker.instance.id
        and not breakers.is_open((prefill.worker.instance.id, decode.worker.instance.id))
    ]
    if not pairs:
        return None
    prefill, decode = min(pairs, key=_order_of_pair)
    return _pair_path(prefill, decode, limits)


def _order_of_pair(pair: tuple[_PathPart, _PathPart]) -> tuple[int, bool, float]:
    prefill, decode = pair
    num_missed = prefill.num_missed + decode.num_missed
    pressure = prefill.weighted_pressure + decode.weighted_pressure
    return num_missed, decode.is_last_resort, pressure


def _prefill_part(
    worker: WorkerForecast, limits: SloLimits, random: Callable[[], float]
) -> _PathPart:
    """Return what a prefill worker adds: the time to first token, and the gaps of its streams."""
    first_token_s = worker.first_token_s()
    gap_s = worker.prompt_gap_s()
    # Which parts of their limits these times take.
    ttft_part = (limits.waited_s + first_token_s) / limits.ttft_s
    gap_part = gap_s / limits.others_itl_s
    num_delayed = worker.num_delayed(gap_s, limits.others_itl_s)
    pressure = ttft_part if ttft_part > gap_part else gap_part
    misses = ttft_part > _TTFT_PART
    return _PathPart(
        worker,
        num_missed=num_delayed + misses,
        weighted_pressure=_blurred(pressure, random) / worker.share,
        num_delayed=num_delayed,
        gap_s=gap_s,
        first_token_s=first_token_s,
    )


def _decode_part(
    worker: WorkerForecast, limits: SloLimits, random: Callable[[], float]
) -> _PathPart:
    """Return what a decode worker adds: the gaps of all its streams."""
    gap_s = worker.decode_gap_s()
    num_delayed = worker.num_delayed(gap_s, limits.others_itl_s)
    misses = gap_s > limits.itl_s or not worker.has_space()
    pressure = gap_s / min(limits.itl_s, limits.others_itl_s)
    takes_further_streams = worker.has_streams and pressure <= _PACKED
    return _PathPart(
        worker,
        num_missed=num_delayed + misses,
        weighted_pressure=_blurred(pressure, random) / worker.share,
        num_delayed=num_delayed,
        gap_s=gap_s,
        is_last_resort=worker.is_slowed_by_streams and not takes_further_streams,
    )


def _with_transfers(
    first_token_s: float, decodes: Sequence[_PathPart], limits: SloLimits
) -> list[_PathPart]:
    """Return the decode parts with their KV transfers, the best part first.

    `decodes` is not changed: decode workers that run the whole request need no transfer.

    Args:
        first_token_s: the time until the best prefill worker has computed the prompt.
        decodes: the parts without transfers.
        limits: the limits of the request.
    """
    parts = []
    for part in decodes:
        transfer_s = part.worker.transfer_s(first_token_s)
        is_late = limits.is_late(limits.waited_s + first_token_s + transfer_s)
        # The prefill takes equally long with every decode worker, so only the transfer counts.
        transfer_pressure = transfer_s / limits.ttft_s / part.worker.share
        parts.append(
            msgspec.structs.replace(
                part,
                num_missed=part.num_delayed + (part.misses or is_late),
                weighted_pressure=max(part.weighted_pressure, transfer_pressure),
            )
        )
    parts.sort(key=_order_of_part)
    return parts


def _best_aggregating(decodes: Sequence[_PathPart]) -> list[WorkerForecast]:
    """Return the decode workers that may be the best one for a whole request.

    They are the workers of the best parts, and the worker that has most of the prompt in its cache.
    """
    tried = [part.worker for part in decodes[:_MAX_AGGREGATING_DECODES]]
    if len(decodes) > _MAX_AGGREGATING_DECODES:
        others = [part.worker for part in decodes[_MAX_AGGREGATING_DECODES:]]
        best_cached = max(others, key=_cached_tokens)
        if best_cached.cached_tokens > max(map(_cached_tokens, tried)):
            tried.append(best_cached)
    return tried


def _pair_path(prefill: _PathPart, decode: _PathPart, limits: SloLimits) -> ChosenPath:
    transfer_s = decode.worker.transfer_s(prefill.first_token_s)
    ttft_s = limits.waited_s + prefill.first_token_s + transfer_s
    misses = decode.misses or limits.is_late(ttft_s)
    return ChosenPath(
        path=Path.PREFILL_DECODE,
        prefill=prefill.worker.instance,
        decode=decode.worker.instance,
        cached_tokens=prefill.worker.cached_tokens,
        ttft_s=ttft_s,
        gap_s=max(prefill.gap_s, decode.gap_s),
        num_missed=misses + prefill.num_delayed + decode.num_delayed,
        pressure=max(
            ttft_s / limits.ttft_s,
            prefill.gap_s / limits.others_itl_s,
            decode.gap_s / min(limits.itl_s, limits.others_itl_s),
        ),
        is_last_resort=decode.is_last_resort,
    )


def _may_aggregate(
    prefills: Sequence[WorkerForecast],
    decodes: Sequence[WorkerForecast],
    aggregated: Sequence[WorkerForecast],
    breakers: PairBreakers,
) -> tuple[list[WorkerForecast], list[WorkerForecast], list[WorkerForecast]]:
    """Return the workers, by role, whose breakers allow that they run whole requests.

    A prefill or decode worker runs no whole requests if each of its pairs has given wrong answers
    or was not probed yet. A worker without pairs may run them.
    """
    if prefills and decodes:
        right_pairs = [
            (prefill, decode)
            for prefill, decode in itertools.product(prefills, decodes)
            if breakers.may_be_right(pair_of(prefill.instance.id, decode.instance.id))
        ]
        right_prefills = {prefill.instance.id for prefill, _ in right_pairs}
        right_decodes = {decode.instance.id for _, decode in right_pairs}
        prefills = [worker for worker in prefills if worker.instance.id in right_prefills]
        decodes = [worker for worker in decodes if worker.instance.id in right_decodes]
    # The pair (None, id) is the worker that runs a whole request.
    closed = [
        [worker for worker in workers if not breakers.is_open((None, worker.instance.id))]
        for workers in (prefills, decodes, aggregated)
    ]
    return closed[0], closed[1], closed[2]


def _paths_on_decode(decodes: Sequence[_PathPart], limits: SloLimits) -> Iterator[ChosenPath]:
    """Return a path for each decode worker that may be the best one for a whole request."""
    last_resorts = {part.worker for part in decodes if part.is_last_resort}
    tried = _best_aggregating(decodes)
    return _aggregated_paths(Path.ON_DECODE, tried, limits, last_resorts)


def _aggregated_paths(
    path: Path,
    workers: Iterable[WorkerForecast],
    limits: SloLimits,
    last_resorts: Container[WorkerForecast] = (),
) -> Iterator[ChosenPath]:
    """Yield a path for each worker that can run a whole request.

    `last_resorts` are the workers whose paths are chosen last.
    """
    for worker in workers:
        instance = worker.instance
        if path is not Path.ON_AGGREGATED and not instance.can_aggregate:
            continue
        ttft_s = limits.waited_s + worker.first_token_s()
        prompt_gap_s = worker.prompt_gap_s()
        decode_gap_s = worker.decode_gap_s()
        # Running streams of the worker wait for the step with the prompt, and then for steps with
        # one more request.
        gap_s = max(prompt_gap_s, decode_gap_s)
        misses = limits.is_late(ttft_s) or decode_gap_s > limits.itl_s or not worker.has_space()
        num_delayed = worker.num_delayed(gap_s, limits.others_itl_s)
        yield ChosenPath(
            path=path,
            prefill=None,
            decode=instance,
            cached_tokens=worker.cached_tokens,
            ttft_s=ttft_s,
            gap_s=gap_s,
            num_missed=misses + num_delayed,
            pressure=max(
                ttft_s / limits.ttft_s,
                decode_gap_s / limits.itl_s,
                gap_s / limits.others_itl_s,
            ),
            is_last_resort=worker in last_resorts,
        )
