"""Place requests on the path that keeps the limits of their times (`--router-mode slo`).

`path_selection` has the rule. Until the times of a model's workers are known, requests are placed
by cost and prefixes, as with `--router-mode kv`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Final, Self

import msgspec

from dynamo_trtllm.frontend.routing.cluster_view import ModelView, PairGroup, excluding
from dynamo_trtllm.frontend.routing.cost_placement import Placement, RankedSelection
from dynamo_trtllm.frontend.routing.pair_breakers import PairBreakers
from dynamo_trtllm.frontend.routing.path_selection import (
    ChosenPath,
    Path,
    SloLimits,
    select_path,
)
from dynamo_trtllm.frontend.routing.prefix_index import (
    ClusterPrefixes,
    PrefixOverlaps,
    PromptHashes,
)
from dynamo_trtllm.frontend.routing.worker_forecast import WorkerForecast
from dynamo_trtllm.frontend.routing.worker_load import cost_of_equals
from dynamo_trtllm.protocol.errors import SloUnreachable
from dynamo_trtllm.protocol.messages import GenerateRequest, Instance, RequestSlo, Role

log = logging.getLogger(__name__)

SLO_MODE: Final = "slo"  # the router mode
# The roles in which workers are compared. `_choose` and `_forecasts` use this order.
_ROLES: Final = (Role.PREFILL, Role.DECODE, Role.AGGREGATED)
# `Retry-After` of a rejected request is the time by which its first token would have been late,
# within these bounds.
_MIN_RETRY_S: Final = 1
_MAX_RETRY_S: Final = 60


class SloSelection(RankedSelection, frozen=True):
    """A selection by predicted times."""

    chosen: ChosenPath

    def aggregated_on(self, instance: Instance) -> Self:
        """See `WorkerSelection.aggregated_on`. The predicted times remain those of the pair."""
        chosen = msgspec.structs.replace(
            self.chosen, path=Path.ON_DECODE, prefill=None, decode=instance
        )
        selection = super().aggregated_on(instance)
        return msgspec.structs.replace(selection, chosen=chosen)


class SloPlacement(Placement):
    """Selects the path and the workers of requests by their predicted times.

    Args:
        ttft_s: limit of the time to first token of requests that name none.
        itl_s: limit of the time between two tokens of requests that name none.
        rejects: reject a request that no path can serve within the limits.
        prefixes: see `Placement`.
        overlap_credit: see `Placement`.
        seed: see `Placement`.
    """

    def __init__(
        self,
        ttft_s: float,
        itl_s: float,
        prefixes: ClusterPrefixes | None = None,
        *,
        rejects: bool = False,
        overlap_credit: float = 1.0,
        seed: int | None = None,
    ) -> None:
        super().__init__(SLO_MODE, prefixes, overlap_credit=overlap_credit, seed=seed)
        self._default = SloLimits(ttft_s, itl_s, itl_s)
        self._rejects = rejects
        # Models for which a log line has said that their times are not known.
        self._unpredicted: set[str] = set()

    def select(
        self,
        view: ModelView,
        prompt: PromptHashes,
        breakers: PairBreakers,
        now: float,
        *,
        avoid: int | None = None,
        waited_s: float = 0.0,
        may_reject: bool = False,
    ) -> RankedSelection | None:
        """Return the workers of the best path, or what `Placement.select` returns.

        `Placement.select` is used if the times of the workers are not known yet, or if the request
        names a data-parallel rank, which only one of its workers has.

        Args:
            view: see `Placement.select`.
            prompt: see `Placement.select`.
            breakers: see `Placement.select`.
            now: see `Placement.select`.
            avoid: see `Placement.select`.
            waited_s: for how long the request has waited since it arrived.
            may_reject: whether the request may be rejected for its limits. True only at its first
                attempt.

        Raises:
            SloUnreachable: no path is predicted to keep the limits, and the frontend rejects such
                requests.
        """
        request = prompt.request
        if request.dp_rank is not None or request.prefill_dp_rank is not None:
            return super().select(view, prompt, breakers, now, avoid=avoid)
        limits = self._limits(request, waited_s)
        chosen = self._choose(view, prompt, limits, breakers, now, avoid)
        if chosen is None:
            self._log_unpredicted(request.model)
            return super().select(view, prompt, breakers, now, avoid=avoid)
        if self._rejects and may_reject and not chosen.meets_slo:
            raise _unreachable(chosen, limits)
        return SloSelection(
            prefill=chosen.prefill,
            decode=chosen.decode,
            prompt=prompt,
            overlap_tokens=chosen.cached_tokens,
            chosen=chosen,
        )

    def _limits(self, request: GenerateRequest, waited_s: float) -> SloLimits:
        """Return the limits of a request: its own limits, else the limits of the frontend."""
        default = self._default
        own = RequestSlo() if request.slo is None else request.slo
        return SloLimits(
            ttft_s=default.ttft_s if own.ttft_s is None else own.ttft_s,
            itl_s=default.itl_s if own.itl_s is None else own.itl_s,
            others_itl_s=default.itl_s,
            waited_s=waited_s,
        )

    def _choose(
        self,
        view: ModelView,
        prompt: PromptHashes,
        limits: SloLimits,
        breakers: PairBreakers,
        now: float,
        avoid: int | None,
    ) -> ChosenPath | None:
        """Return the best path of all pairing keys.

        None: the times are not known, or there is no path.
        """
        overlaps = None if self.prefixes is None else self.prefixes.overlaps(prompt, now)
        if overlaps is not None and not overlaps.matches:
            overlaps = None
        groups = list(view.groups.values()) or [PairGroup()]
        paths: list[ChosenPath] = []
        for group in groups:
            prefills = group.prefill if avoid is None else excluding(group.prefill, (avoid,))
            # Aggregated workers have no pairing key. They are compared with the first group.
            aggregated = view.aggregated if group is groups[0] else ()
            compared = [
                self._compared(view, instances, overlaps, role)
                for role, instances in zip(
                    _ROLES, (prefills, group.decode, aggregated), strict=True
                )
            ]
            forecasts = self._forecasts(view, compared, prompt, overlaps, now)
            if forecasts is None:
                continue
            prefill_forecasts, decode_forecasts, aggregated_forecasts = forecasts
            path = select_path(
                prefill_forecasts,
                decode_forecasts,
                aggregated_forecasts,
                limits,
                breakers=breakers,
                random=self._random,
            )
            if path is not None:
                paths.append(path)
        return min(paths, key=_order, default=None)

    def _forecasts(
        self,
        view: ModelView,
        compared: Sequence[Mapping[int, Instance]],
        prompt: PromptHashes,
        overlaps: PrefixOverlaps | None,
        now: float,
    ) -> list[list[WorkerForecast]] | None:
        """Return what is predicted for a request at workers of one pairing key, by their role.

        Workers whose load is not known are left out.

        Args:
            view: the workers of the model.
            compared: the prefill, decode and aggregated workers, each by id.
            prompt: the prompt of the request.
            overlaps: what is cached of the prompt.
            now: seconds of a monotonic clock.

        Returns:
            None: the times are not known.
        """
        loads = self.loads
        # The workers of one pairing key are equal, so the measurements of one hold for all.
        shared_cost = cost_of_equals(loads.get(id_) for by_id in compared for id_ in by_id)
        if shared_cost is None:
            return None
        prompt_tokens = len(prompt.request.token_ids)
        forecasts: list[list[WorkerForecast]] = []
        for role, by_id in zip(_ROLES, compared, strict=True):
            cached = [0] * len(by_id) if overlaps is None else overlaps.of(by_id)
            of_role: list[WorkerForecast] = []
            for (instance_id, instance), cached_tokens in zip(by_id.items(), cached, strict=True):
                load = loads.get(instance_id)
                if load.is_fresh(now):
                    cost = load.completed_cost(shared_cost)
                    credited_tokens = int(self.overlap_credit * cached_tokens)
                    forecast = WorkerForecast(
                        instance,
                        load,
                        cost,
                        prompt_tokens,
                        credited_tokens,
                        role=role,
                        itl_s=self._default.itl_s,
                        share=view.share(instance, role),
                        takes_streams=view.share(instance, Role.DECODE) > 0,
                        takes_prompts=view.share(instance, Role.PREFILL) > 0,
                    )
                    of_role.append(forecast)
            forecasts.append(of_role)
        return forecasts

    def _log_unpredicted(self, model: str) -> None:
        """Log once that the times of a model's workers are not known."""
        if model in self._unpredicted:
            return
        self._unpredicted.add(model)
        log.warning(
            "the times of workers of %s are not known yet: until they have measured some,"
            " --router-mode slo selects as kv does",
            model,
        )


def _order(path: ChosenPath) -> tuple[int, bool, float]:
    """Return the sort key of a path: better paths come first."""
    return path.num_missed, path.is_last_resort, path.pressure


def _unreachable(path: ChosenPath, limits: SloLimits) -> SloUnreachable:
    """Return the error of a request that no path can serve within its limits."""
    late_s = math.ceil(path.ttft_s - limits.ttft_s)
    itl_s = min(limits.itl_s, limits.others_itl_s)
    misses = []
    if limits.is_late(path.ttft_s):
        limit = f"limit {1000 * limits.ttft_s:g}"
        if path.ttft_s <= limits.ttft_s:
            limit += ", and the prediction may be wrong by a tenth"
        misses.append(f"its first token after {1000 * path.ttft_s:.0f} ms ({limit})")
    if path.gap_s > itl_s:
        misses.append(f"gaps of {1000 * path.gap_s:.0f} ms (limit {1000 * itl_s:g})")
    if not misses:
        misses.append("no space in the batch or the KV cache of its worker")
    return SloUnreachable(
        "no worker can keep the limits of this request now: the best path has"
        f" {' and '.join(misses)}; retry later, or raise the limits",
        retry_after_s=max(_MIN_RETRY_S, min(_MAX_RETRY_S, late_s)),
    )
