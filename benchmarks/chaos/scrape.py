"""What processes tell over HTTP: JSON and metrics. Blocks for at most a few seconds."""

from __future__ import annotations

import math
import re
from urllib.error import HTTPError
from urllib.request import urlopen

_PREFIX = "dynamo_trtllm_"
_TIMEOUT_S = 2.0


def fetch(url: str) -> bytes:
    """Raises OSError for no answer, and for one that is not a success."""
    try:
        with urlopen(url, timeout=_TIMEOUT_S) as answer:
            return bytes(answer.read())
    except HTTPError as exc:
        exc.close()
        raise OSError(f"{url} answered {exc.code}") from None


def gauges(url: str) -> dict[str, float]:
    """The unlabelled ones, short names. NaN for a process that does not answer."""
    try:
        text = fetch(f"{url}/metrics").decode()
    except (OSError, ValueError):
        return {"running": math.nan, "inflight": math.nan}
    return {name: float(value) for name, value in re.findall(rf"^{_PREFIX}(\w+) (\S+)$", text, re.M)}


def total(url: str, counter: str, label: str = "") -> float:
    """Return a counter's sum over all its labels, or over those with this one (`name="value"`). Raise OSError."""
    labels = rf"{{.*{label}.*}}" if label else r"(?:{.*})?"
    pattern = rf"^{_PREFIX}{counter}_total{labels} (\S+)$"
    return sum(float(value) for value in re.findall(pattern, fetch(f"{url}/metrics").decode(), re.M))
