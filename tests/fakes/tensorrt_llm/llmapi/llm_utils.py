"""The conversion that trtllm-serve runs on the arguments of a YAML file: dictionaries become
objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensorrt_llm.standin.release import LINE

# Argument -> the key that names its class, and the classes.
CLASSES: dict[str, tuple[str, tuple[str, ...]]] = {
    "speculative_config": ("decoding_type", ("MTP", "Eagle", "NGram", "DraftTarget", "AUTO")),
    "sparse_attention_config": ("algorithm", ("rocket", "dsa")),
}


@dataclass
class NamedConfig:
    """One of the vendor's classes, by its name."""

    name: str
    values: dict[str, Any]


def update_llm_args_with_extra_dict(
    llm_args: dict[str, Any],
    llm_args_dict: dict[str, Any],
    extra_llm_api_options: str | None = None,
) -> dict[str, Any]:
    """On the caller's dictionaries, as the real one does."""
    for argument in CLASSES.keys() & llm_args_dict.keys():
        llm_args_dict[argument] = named(argument, llm_args_dict[argument])
    return llm_args | llm_args_dict


def named(argument: str, data: dict[str, Any]) -> NamedConfig:
    """Raises ValueError for a class that there is not."""
    key, known = CLASSES[argument]
    if data.get(key) not in known:
        raise ValueError(f"Invalid {key}: {data.get(key)}")
    return NamedConfig(data.pop(key), data)


def checked(argument: str, value: Any) -> Any:
    """What `LLM` makes of it: before 1.3 its classes have no field for their own name."""
    if not isinstance(value, dict):
        return value
    key, known = CLASSES[argument]
    if LINE >= (1, 3):
        return named(argument, dict(value))
    if key in value:
        raise AttributeError(
            f"{key!r} is a ClassVar of {value[key]} and cannot be set on an instance"
        )
    return NamedConfig(known[0], value)  # the first that fits
