"""Define the settings with which a frontend selects workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from dynamo_trtllm.config.config_base import NonNegativeFloat, PositiveFloat, option
from dynamo_trtllm.config.http_access import FrontendAccessConfig
from dynamo_trtllm.protocol.number_types import MAX_SLO_S

# Settings of routing, and the router modes in which they have an effect.
_MODES_OF_SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "router_kv_events": ("kv", "slo"),
    "router_ttl_secs": ("kv", "slo"),
    "router_kv_overlap_score_credit": ("kv", "slo"),
    "router_temperature": ("kv",),
    "slo_ttft_ms": ("slo",),
    "slo_itl_ms": ("slo",),
    "slo_policy": ("slo",),
}
SloMilliseconds = Annotated[float, Field(gt=0, le=1000 * MAX_SLO_S)]


class RoutingConfig(FrontendAccessConfig):
    """The settings of a frontend that decide which workers its requests get."""

    router_mode: Literal["round-robin", "random", "least-loaded", "kv", "slo"] = option(
        "HTTP and routing",
        "round-robin",
        env="DYN_ROUTER_MODE",
        help="How workers are selected. round-robin: in turn. random: at random. least-loaded: the"
        " prefill worker with the fewest prompt tokens to compute and the decode worker with the"
        " fewest tokens in its KV cache; for prompts of different lengths or workers of different"
        " speed. kv: as least-loaded, but prompt tokens in a worker's prefix cache do not count;"
        " for prompts that begin alike, as in conversations. slo: the path on which the first token"
        " and the time between tokens are predicted to keep --slo-ttft-ms and --slo-itl-ms; a"
        " prefill or decode worker may then run a whole request.",
    )
    slo_ttft_ms: SloMilliseconds | None = option(
        "HTTP and routing",
        None,
        help="With --router-mode slo, which needs it: limit of the time to first token in"
        " milliseconds, for requests that name none.",
    )
    slo_itl_ms: SloMilliseconds | None = option(
        "HTTP and routing",
        None,
        help="With --router-mode slo, which needs it: limit of the longest time between two tokens"
        " in milliseconds, for requests that name none, and for those that run already.",
    )
    slo_policy: Literal["best-effort", "reject"] = option(
        "HTTP and routing",
        "best-effort",
        help="With --router-mode slo: what happens to a request for which no path is predicted to"
        " keep the limits. best-effort: it takes the path on which the fewest requests miss"
        " theirs. reject: it is answered with 429.",
    )
    router_kv_events: bool = option(
        "HTTP and routing",
        True,
        env=("DYN_ROUTER_USE_KV_EVENTS", "DYN_USE_KV_EVENTS"),
        aliases=("--kv-events",),
        help="With --router-mode kv or slo: read the KV events of workers that run with"
        " --publish-kv-events. For all other workers (with --no-router-kv-events: for all), assume"
        " that a worker has the prompts that this frontend process sent to it.",
    )
    router_ttl_secs: PositiveFloat = option(
        "HTTP and routing",
        120.0,
        env="DYN_ROUTER_TTL_SECS",
        help="With --router-mode kv or slo: seconds for which a worker without KV events is assumed"
        " to have a prompt.",
    )
    router_kv_overlap_score_credit: Annotated[float, Field(ge=0, le=1)] = option(
        "HTTP and routing",
        1.0,
        env="DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
        help="With --router-mode kv or slo: how much of a prompt token's cost is saved if the token"
        " is in the prefix cache, from 0 (caches are ignored) to 1 (the token costs nothing).",
    )
    router_temperature: NonNegativeFloat = option(
        "HTTP and routing",
        0.0,
        env="DYN_ROUTER_TEMPERATURE",
        help="With --router-mode kv: 0 selects the worker with the lowest cost. With more,"
        " selection is random: the softmax of the negative costs, divided by their range and this"
        " number.",
    )

    @model_validator(mode="after")
    def _routing_fits(self) -> Self:
        """Reject settings of routing that are missing, or have no effect in this router mode."""
        for name, modes in _MODES_OF_SETTINGS.items():
            is_given = getattr(self, name) != type(self).model_fields[name].default
            if is_given and self.router_mode not in modes:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"{flag} has an effect only with --router-mode {' or '.join(modes)}; add that,"
                    " or remove the flag"
                )
        if self.router_mode == "slo" and (self.slo_ttft_ms is None or self.slo_itl_ms is None):
            raise ValueError(
                "--router-mode slo needs both limits; pass them, such as --slo-ttft-ms 2000"
                " --slo-itl-ms 100"
            )
        return self
