"""Define the settings that decide who may use a frontend."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from dynamo_trtllm.config.config_base import ProcessConfig, matching, option

_KEY = re.compile(r"[\x21-\x2b\x2d-\x7e]{16,256}")  # a comma separates keys in the environment


def _key_list(given: object) -> object:
    """Return the keys of a value as in the environment, or as in YAML.

    Another value must not be quoted in an error, because it may be a key.
    """
    if isinstance(given, str):
        return tuple(part.strip() for part in given.split(","))
    if not isinstance(given, list | tuple) or not all(isinstance(key, str) for key in given):
        raise ValueError("expected API keys as texts")
    return tuple(given)


def _check_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    for key in keys:
        if not _KEY.fullmatch(key):
            raise ValueError(
                "an API key must have 16 to 256 visible ASCII characters and no comma; openssl rand"
                " -hex 32 makes one"
            )
    if len(set(keys)) < len(keys):
        raise ValueError("an API key is given twice; remove one of them")
    return keys


ApiKeyList = Annotated[tuple[str, ...], BeforeValidator(_key_list), AfterValidator(_check_keys)]


def _first_key(given: object) -> object:
    """Return the first key of a variable that may have several, because a frontend reads it."""
    return given.partition(",")[0].strip() if isinstance(given, str) else given


SentApiKey = Annotated[
    str,
    BeforeValidator(_first_key),
    matching(r"[\x21-\x7e]{1,256}", "an API key has 1 to 256 visible ASCII characters"),
]
SENT_API_KEY_HELP = (
    "API key to send. Prefer the environment: the users of the machine can read command lines."
    " Default: none."
)


class HttpAccessConfig(ProcessConfig):
    """The settings of a frontend that decide who may use it."""

    api_key: ApiKeyList = option(
        "HTTP access",
        (),
        is_secret=True,
        help="API key that clients must send, for all paths and without limits. May be repeated; in"
        " the environment, commas separate keys. The users of the machine can read command lines,"
        " so prefer the environment.",
    )
    api_keys_file: Path | None = option(
        "HTTP access",
        None,
        help="File of API keys with names, models and limits, written by dynamo-trtllm keys. It is"
        " read again when it changes.",
    )

    @property
    def needs_api_key(self) -> bool:
        """Return whether clients need an API key."""
        return bool(self.api_key) or self.api_keys_file is not None
