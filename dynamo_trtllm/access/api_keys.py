"""Define an API key, and generate, hash and look up keys."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from dynamo_trtllm.protocol.number_types import MAX_PRIORITY, MAX_WEIGHT, MIN_WEIGHT

MAX_KEY_CHARS: Final = 256
PREFIX: Final = "sk-"  # tools that search for leaked keys look for it
_KEY_BYTES = 32  # random bytes of a generated key

Scope: TypeAlias = Literal["api", "status", "all"]
_Limit: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
KeyName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
_Sha256: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
_ModelName: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Priority: TypeAlias = Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
_Weight: TypeAlias = Annotated[float, msgspec.Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)]


class ApiKey(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What is known of an API key: its name and hash, and what it allows. None: no limit."""

    name: KeyName  # shown in logs; the key itself never is
    sha256: _Sha256  # of the key, in hexadecimal
    # api: the API. status: /health, /metrics and the console. all: both.
    scope: Scope = "api"
    models: tuple[_ModelName, ...] | None = None
    # The priority of its requests, unless they ask for a higher value. Lower values come first.
    priority: _Priority = 0
    # Share of the workers, relative to those of other keys whose requests wait.
    weight: _Weight = 1.0
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    concurrent_generations: _Limit | None = None  # a request for n choices counts as n
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None

    @property
    def has_limits(self) -> bool:
        """Return whether the requests of this key are counted."""
        limits = (self.requests_per_minute, self.tokens_per_minute, self.concurrent_generations)
        return any(limit is not None for limit in limits)


def new_key() -> str:
    """Return a new random key."""
    return PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def digest_of(key: str) -> bytes:
    """Return the SHA-256 digest of a key.

    Unlike a password, a key is long and random, and can't be guessed from its digest. So it needs
    neither a slow hash nor a salt.
    """
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()


def by_digest(keys: Iterable[ApiKey]) -> Mapping[bytes, ApiKey]:
    """Return the keys by their digests.

    The time of a lookup reveals no key: it depends on the digest of what a client sends, of which
    the client can't choose the bytes.
    """
    return {bytes.fromhex(key.sha256): key for key in keys}
