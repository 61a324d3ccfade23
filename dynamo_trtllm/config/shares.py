"""Define the settings of `dynamo-trtllm shares`."""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field, model_validator

from dynamo_trtllm.config.client_commands import DeploymentChoiceConfig
from dynamo_trtllm.config.config_base import ConnectionConfig, option
from dynamo_trtllm.protocol.number_text import parse_float
from dynamo_trtllm.protocol.shares import MAX_REASON_CHARACTERS, Shares

ALL = "all"  # every elastic worker
_NUMBER = r"[0-9.eE+-]+"
_SETTING = re.compile(rf"(all|[0-9a-f]{{1,16}})=({_NUMBER})/({_NUMBER})")


class ShareSetting(NamedTuple):
    """The shares of one worker, or of all."""

    worker: str  # instance id in hexadecimal, or ALL
    shares: Shares


def parse_shares(given: str) -> ShareSetting:
    """Parse WORKER=PREFILL/DECODE.

    Raises:
        ValueError: it has another form, or the shares are not allowed.
    """
    match = _SETTING.fullmatch(given)
    if match is None:
        raise ValueError(
            "must be WORKER=PREFILL/DECODE, such as 6dba42c81a3f0=1/0.25, with the id of a worker"
            " or all, and numbers from 0 to 1"
        )
    worker, *numbers = match.groups()
    prefill, decode = (_share(number) for number in numbers)
    shares = Shares(prefill, decode)
    if shares.problem:
        raise ValueError(shares.problem)
    return ShareSetting(worker, shares)


def _share(text: str) -> float:
    """Return a share. Raise ValueError if it is no number from 0 to 1."""
    try:
        share = parse_float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"share {text} must be a number from 0 to 1")
    return share


def _checked(given: str) -> str:
    parse_shares(given)
    return given


class SharesConfig(ConnectionConfig, DeploymentChoiceConfig):
    """Show and set the shares of elastic workers: how much of the prefill and of the decode work
    each of them takes.

    examples:
      %(prog)s
      %(prog)s --set 6dba42c81a3f0=1/0 --set 7f01aa09b2c44=0/1 --reason "long prompts"
      %(prog)s --set all=1/1
      %(prog)s --history
    Several settings are one change, of which all frontends learn at once. Calls in flight finish
    where they are. A planner that runs may change the shares again.
    exit status: 0, 1 if etcd is unreachable, a worker is not registered, or there is no elastic
    worker, 2 for a bad command line
    """

    set_shares: tuple[Annotated[str, AfterValidator(_checked)], ...] = option(
        "role",
        (),
        aliases=("--set",),
        help="Set the shares of a worker, as WORKER=PREFILL/DECODE with numbers from 0 to 1. all"
        " stands for every elastic worker. May be repeated; later ones replace earlier ones.",
    )
    reason: Annotated[str, Field(max_length=MAX_REASON_CHARACTERS)] = option(
        "role", "set by an operator", help="Why they are set, for logs and `shares`."
    )
    history: bool = option(
        "role",
        False,
        help="Show the latest changes, the newest last: when, by which process, why, with the times"
        " that a planner predicted, and the shares before and after.",
    )
    json_output: bool = option(
        "process", False, aliases=("--json",), help="Print JSON instead of a table."
    )

    @model_validator(mode="after")
    def _reason_is_of_a_change(self) -> SharesConfig:
        if "reason" in self.model_fields_set and not self.set_shares:
            raise ValueError("--reason needs --set: it says why shares are set")
        return self
