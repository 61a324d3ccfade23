"""`DisaggregatedParams` of the played release: keyword-only with slots."""

from __future__ import annotations

from typing import Any

from tensorrt_llm.standin.release import fields_class

_REQUEST_TYPES = ("context_only", "generation_only", "context_and_generation")


def check_request_type(params: Any) -> None:
    """Raises ValueError for a type that there is not."""
    if params.request_type not in _REQUEST_TYPES:
        raise ValueError(
            f"Unknown request type: {params.request_type}. Must be one of"
            f" {', '.join(_REQUEST_TYPES)}"
        )


def _post_init(self: Any) -> None:
    if self.request_type is not None:
        self.request_type = self.request_type.lower()
        check_request_type(self)


DisaggregatedParams: Any = fields_class(
    "DisaggregatedParams",
    {"__post_init__": _post_init, "__module__": __name__},
    slots=True,
    kw_only=True,
)
