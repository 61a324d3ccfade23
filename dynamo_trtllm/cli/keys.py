"""Add, list and revoke API keys in the file that frontends read (--api-keys-file)."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

from dynamo_trtllm.access.api_keys import ApiKey, digest_of, new_key
from dynamo_trtllm.access.keys_file import add_key, read_keys, remove_key
from dynamo_trtllm.config.commands import KeysConfig
from dynamo_trtllm.config.load import command
from dynamo_trtllm.config.text_table import format_table
from dynamo_trtllm.protocol.errors import ConfigError

PROG = "python -m dynamo_trtllm.cli.keys"


@command(KeysConfig, PROG)
def main(config: KeysConfig) -> None:
    """Run the command. Exit with status 0, or 2 for a bad command line or file."""
    if config.action == "list":
        sys.stdout.write(_table(config.api_keys_file))
    elif config.action == "revoke":
        remove_key(config.api_keys_file, config.key_name)
        _note(f"{config.key_name} was removed from {config.api_keys_file}")
    else:
        _add(config)


def _add(config: KeysConfig) -> None:
    """Write a new key to the file, and print it. Raises ConfigError."""
    if config.expires is not None and config.expires <= datetime.now(UTC):
        raise ConfigError(
            f"--expires {config.expires.isoformat()} is in the past, so the key would not be valid;"
            " give a later time",
            field="expires",
        )
    key = new_key()
    add_key(
        config.api_keys_file,
        ApiKey(
            name=config.key_name,
            sha256=digest_of(key).hex(),
            scope=config.scope,
            models=config.models or None,
            priority=config.priority,
            weight=config.weight,
            requests_per_minute=config.requests_per_minute,
            tokens_per_minute=config.tokens_per_minute,
            concurrent_generations=config.concurrent_generations,
            expires=config.expires,
        ),
    )
    sys.stdout.write(f"{key}\n")
    _note(
        f"{config.key_name} was added to {config.api_keys_file}. The key is shown only now: the"
        " file has its hash"
    )


def _table(path: Path) -> str:
    """Return a table of the keys of a file."""
    limits = ("requests/min", "tokens/min", "generations")
    rows = [("name", "scope", "models", "priority", "weight", *limits, "expires")]
    now = datetime.now(UTC)
    for key in read_keys(path).keys:
        expires = "-"
        if key.expires is not None:
            expires = key.expires.isoformat()
            if key.expires <= now:
                expires += " (expired)"
        rows.append(
            (
                key.name,
                key.scope,
                ",".join(key.models) if key.models is not None else "all",
                str(key.priority),
                f"{key.weight:g}",
                _limit(key.requests_per_minute),
                _limit(key.tokens_per_minute),
                _limit(key.concurrent_generations),
                expires,
            )
        )
    return format_table(rows)


def _limit(limit: int | None) -> str:
    return "-" if limit is None else str(limit)


def _note(text: str) -> None:
    # The key alone is on stdout, so that a script can read it.
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    main()
