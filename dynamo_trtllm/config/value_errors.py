"""Say in one line what is wrong with settings that Python code passes."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from dynamo_trtllm.config.suggestions import suggest
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.sanitize import MASK, mask_address, shown


def check_settings_type(settings: object, model: type[BaseModel]) -> None:
    """Raise ConfigError unless settings are an object of `model`."""
    if not isinstance(settings, model):
        raise ConfigError(
            f"the settings are {shown(settings)}; pass a {model.__name__}(…)", field="config"
        )


def value_error(model: type[BaseModel], error: ValidationError) -> ConfigError:
    """Return the error of settings with wrong values.

    It names the first one, and counts the others.

    Args:
        model: class of the settings.
        error: what pydantic reports.
    """
    problems = error.errors(include_url=False)
    # A misspelled name comes first: it may be why another value is missing.
    problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    text = f"{model.__name__}: {_problem(model, name, first)}"
    num_more = len(problems) - 1
    if num_more:
        text += f" (and {num_more} more)"
    return ConfigError(text, field=name or None)


def _problem(model: type[BaseModel], name: str, problem: Any) -> str:
    message = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    if not name:
        return message
    if problem["type"] == "extra_forbidden":
        return f"there is no setting {name}; {_advice(model, name)}"
    if problem["type"] == "missing":
        return f"{name} is missing; pass it"
    value = problem["input"]
    if _extra(model, name).get("is_secret"):
        value = MASK
    if isinstance(value, str) and _extra(model, name).get("is_address"):
        value = mask_address(value)
    return f"{name} is {shown(value)}: {message}"


def _advice(model: type[BaseModel], name: str) -> str:
    """Return what to pass instead of an unknown setting."""
    meant: dict[str, str] = {}
    for field in model.model_fields:
        meant[field] = field
        for alias in _extra(model, field).get("aliases", ()):
            meant[alias.lstrip("-").replace("-", "_")] = field
    guess = name if name in meant else suggest(name, meant)
    if guess is None:
        return f"the settings are the fields of {model.__name__}"
    return f"use {meant[guess]}" if guess == name else f"did you mean {meant[guess]}?"


def _extra(model: type[BaseModel], name: str) -> dict[str, Any]:
    """Return what `option` says of a field."""
    field = model.model_fields.get(name)
    extra = None if field is None else field.json_schema_extra
    return extra if isinstance(extra, dict) else {}
