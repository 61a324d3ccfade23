"""Describe a change of vLLM's code, and make it if the installed release needs it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from dynamo_trtllm.protocol.errors import ConfigError, DynamoError, EngineFailed

# The classes of errors that an access to a missing or changed part of vLLM raises.
MISFITS = (
    ConfigError,
    ImportError,
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    OSError,
    SyntaxError,
)

# The processes of vLLM configure the logger "vllm", and this one with it.
log = logging.getLogger("vllm.dynamo_trtllm")


class Patch(NamedTuple):
    """One fault or gap of vLLM, and how this project mends it.

    The table in the documentation is generated from the patches.
    """

    name: str  # name of the module
    fault: str  # what goes wrong without the patch
    upstream: str  # link to the issue or change in vLLM; "none known"
    needed_in: str  # releases
    detection: str  # how the module finds out whether a release needs it
    goes: str  # when the module can be deleted
    # True if an engine without the patch answers wrongly or dies. Then the engine refuses to start
    # with a release that the patch does not fit.
    is_vital: bool

    @property
    def otherwise(self) -> str:
        """What happens with a release that the patch does not fit."""
        if self.is_vital:
            return "the engine refuses to start"
        return "the engine says so and runs without it"


def apply(patch: Patch, is_needed: Callable[[], bool], install: Callable[[], None]) -> bool:
    """Make a change if the installed release needs it.

    Returns:
        True if the change was made.

    Raises:
        EngineFailed: the release needs the change and has another form, and an engine without it
            would be wrong.
    """
    try:
        if not is_needed():
            return False
        install()
    except MISFITS as exc:
        reason = exc.message if isinstance(exc, DynamoError) else f"{type(exc).__name__}: {exc}"
        if patch.is_vital:
            raise EngineFailed(
                f"the patch {patch.name} does not fit this release of vLLM ({reason}). Without it,"
                f" {patch.fault}; install a release that docs/vllm.md names"
            ) from exc
        log.warning(
            "running without the patch %s, which does not fit this vLLM (%s)", patch.name, reason
        )
        return False
    return True
