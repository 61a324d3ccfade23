"""The only writer of the process environment, for libraries that take a setting no other way.

What the user has set stays as it is. Nothing here reads configuration.
"""

from __future__ import annotations

import logging
import os

_log = logging.getLogger(__name__)
_wanted_by: dict[str, str] = {}


def export(name: str, value: str, *, wanted_by: str) -> str:
    """Set the variable unless the user has set it to something else; returns the value now in force."""
    present = os.environ.get(name)
    if present is not None and present != value:
        _log.warning("%s is already %r: kept, although %s wants %r", name, present, wanted_by, value)
        return present
    os.environ[name] = value
    _wanted_by[name] = wanted_by
    return value


def exported() -> dict[str, str]:
    """Variables set by this process, and who wanted each."""
    return dict(_wanted_by)
