"""Read JSON and metrics of processes over HTTP. Each call blocks for a few seconds at most."""

from __future__ import annotations

import math
import re
from urllib.error import HTTPError

from .credentials import open_url

_PREFIX = "dynamo_trtllm_"
_TIMEOUT_S = 2.0


def fetch(url: str) -> bytes:
    """Return the body of a successful response. Raise OSError otherwise."""
    try:
        with open_url(url, _TIMEOUT_S) as answer:
            return bytes(answer.read())
    except HTTPError as exc:
        exc.close()
        raise OSError(f"{url} returned status {exc.code}") from None


def gauges(url: str) -> dict[str, float]:
    """Return the metrics without labels by name, without the common prefix.

    If the process does not answer, it is not known how many requests it has: they are NaN.
    """
    try:
        text = fetch(f"{url}/metrics").decode()
    except (OSError, ValueError):
        return {"running": math.nan, "inflight": math.nan}
    return {
        name: float(value) for name, value in re.findall(rf"^{_PREFIX}(\w+) (\S+)$", text, re.M)
    }


def total(url: str, counter: str, label: str = "") -> float:
    """Return the sum of a counter over all labels, or over those with `label` (`name="value"`).

    Raise OSError.
    """
    labels = rf"{{.*{label}.*}}" if label else r"(?:{.*})?"
    pattern = rf"^{_PREFIX}{counter}_total{labels} (\S+)$"
    return sum(
        float(value) for value in re.findall(pattern, fetch(f"{url}/metrics").decode(), re.M)
    )
