"""Read the limits that a request sets for its times: headers, or fields of `nvext`."""

from __future__ import annotations

from typing import Final

from dynamo_trtllm.frontend.api.sampling import NvExt
from dynamo_trtllm.protocol.errors import InvalidRequest, UnsupportedParameter
from dynamo_trtllm.protocol.messages import RequestSlo
from dynamo_trtllm.protocol.number_text import parse_float
from dynamo_trtllm.protocol.number_types import MAX_SLO_S
from dynamo_trtllm.protocol.sanitize import shorten
from dynamo_trtllm.support.http_server.exchange import HttpRequest

_TTFT: Final = "x-slo-ttft-ms"
_ITL: Final = "x-slo-itl-ms"
_MAX_CHARS: Final = 32  # most characters of a wrong value in an error


def request_slo(request: HttpRequest, nvext: NvExt, router_mode: str) -> RequestSlo | None:
    """Return the limits that a request sets; None: it sets none.

    Args:
        request: the request, which has the headers.
        nvext: the field `nvext` of the body, which was checked already.
        router_mode: the router mode of the frontend.

    Raises:
        InvalidRequest: a header is not a number within the bounds, or differs from the field.
        UnsupportedParameter: no path is chosen by limits in this router mode.
    """
    ttft_ms = _limit(request, _TTFT, "nvext.slo_ttft_ms", nvext.slo_ttft_ms)
    itl_ms = _limit(request, _ITL, "nvext.slo_itl_ms", nvext.slo_itl_ms)
    if ttft_ms is None and itl_ms is None:
        return None
    if router_mode != "slo":
        field = "nvext.slo_itl_ms" if ttft_ms is None else "nvext.slo_ttft_ms"
        raise UnsupportedParameter(
            f"limits of times, such as {field} and the headers X-SLO-TTFT-MS and X-SLO-ITL-MS, have"
            f" no effect with --router-mode {router_mode}; leave them out",
            field=field,
        )
    return RequestSlo(
        ttft_s=None if ttft_ms is None else ttft_ms / 1000,
        itl_s=None if itl_ms is None else itl_ms / 1000,
    )


def _limit(request: HttpRequest, header: str, field: str, in_body: float | None) -> float | None:
    """Return a limit in milliseconds; None: the request does not set it."""
    text = request.header(header.encode())
    if text is None:
        return in_body
    name = header.upper()
    milliseconds = _number(text)
    if milliseconds is None or not 0 < milliseconds <= 1000 * MAX_SLO_S:
        raise InvalidRequest(
            f"{name} is {shorten(text, _MAX_CHARS)!r}; it must be a number of milliseconds above 0"
            f" and at most {1000 * MAX_SLO_S:.0f}",
            field=name,
        )
    if in_body is not None and in_body != milliseconds:
        raise InvalidRequest(f"{field} differs from {name}; send one of them", field=field)
    return milliseconds


def _number(text: str) -> float | None:
    """Return the number that a text has; None: the text is not a number."""
    try:
        return parse_float(text)
    except ValueError:
        return None
