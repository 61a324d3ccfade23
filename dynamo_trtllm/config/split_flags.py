"""Split the words of a command line by the settings to which its flags belong."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_trtllm.config.config_base import Config
from dynamo_trtllm.config.flags import flags_of


def split_words(words: Sequence[str], models: Sequence[type[Config]]) -> list[list[str]]:
    """Return the words of each model: its flags with their values, in the order typed.

    A flag of several models belongs to the first model if it has it, otherwise to each that has it.
    Words that are no flag of any belong to the first.

    Args:
        words: a command line without the program name.
        models: classes of settings.
    """
    # For each model, its flags, and whether each takes a value.
    flags = [flag_names(model) for model in models]
    parts: list[list[str]] = [[] for _ in models]
    index = 0
    while index < len(words):
        name, equals, _ = words[index].partition("=")
        owners = [owner for owner, own_flags in enumerate(flags) if name in own_flags]
        if not owners or 0 in owners:
            owners = [0]
        end = index + 1
        takes_value = flags[owners[0]].get(name, False)
        # In `--flag=VALUE`, the value is in the same word.
        if takes_value and not equals:
            end += 1
        for owner in owners:
            parts[owner] += words[index:end]
        index = end
    return parts


def flag_names(model: type[Config]) -> dict[str, bool]:
    """Return all flags of a model, and whether each takes a value."""
    takes_value: dict[str, bool] = {}
    for flag in flags_of(model):
        for name in flag.names[1:] if flag.positional else flag.names:
            takes_value[name] = flag.kind is not bool
            if flag.kind is bool:
                takes_value[f"--no-{name.removeprefix('--')}"] = False
        for name in flag.const_flags:
            takes_value[name] = False
    return takes_value
