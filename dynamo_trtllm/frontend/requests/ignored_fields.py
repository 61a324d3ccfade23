"""Report ignored fields of requests: in a response header, in metrics and in the log."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Literal

from dynamo_trtllm.api.unknown_fields import IgnoredFields, collector
from dynamo_trtllm.http_server.exchange import HttpRequest
from dynamo_trtllm.observability.metrics import FrontendMetrics

log = logging.getLogger(__name__)

_MAX_LOGGED = 1000  # ignored fields that are remembered as logged; clients choose their names
_PROGRAM_CHARS = 64
_NO_PROGRAM = re.compile(r"[^\w./-]", re.ASCII)
_NO_NAME = re.compile(r"[^\w.-]", re.ASCII)


class IgnoredFieldReports:
    """The reports of ignored fields.

    The log names each once per client: a program that a header User-Agent names.

    Args:
        mode: what happens to unknown fields, as `--unknown-fields` says.
        metrics: counts the ignored fields.
    """

    def __init__(self, mode: Literal["reject", "warn", "ignore"], metrics: FrontendMetrics) -> None:
        self._mode = mode
        self._metrics = metrics
        # Fields that were logged, as (client, name), newest last.
        self._logged: dict[tuple[str, str], None] = {}

    def collector(self) -> IgnoredFields | None:
        """Return what collects the unknown fields of a request; None: all are rejected."""
        return collector(self._mode)

    def report(
        self, unknown: IgnoredFields | None, ineffective: Iterable[str], request: HttpRequest
    ) -> str:
        """Report the ignored fields of a request. Return them for the response header.

        Args:
            unknown: the unknown fields that were collected.
            ineffective: known fields that have no effect on the model.
            request: the request.
        """
        ignored = IgnoredFields()
        if self._mode != "ignore":
            ignored.add([*(unknown or ()), *ineffective])
        if not ignored:
            return ""
        safe = [_NO_NAME.sub("?", name) for name in ignored]
        client = _program_of(request)
        new = [name for name in safe if (client, name) not in self._logged]
        if new:
            log.warning("request fields are ignored: %s (client %s)", ", ".join(new), client)
        for name in safe:
            self._metrics.field_ignored(name)
            self._logged.pop((client, name), None)
            self._logged[client, name] = None
        while len(self._logged) > _MAX_LOGGED:
            del self._logged[next(iter(self._logged))]
        return ", ".join(safe)


def _program_of(request: HttpRequest) -> str:
    """Return the name and version of the client's program; if unknown, its address.

    They are in the header User-Agent.
    """
    named = (request.header(b"user-agent") or "").split(maxsplit=1)
    if not named:
        return request.client
    return _NO_PROGRAM.sub("?", named[0][:_PROGRAM_CHARS])
