"""Turn the fields of a config model into command-line flags: names, help, conversion and an argparse parser.

The caller passes argv; the module does not read the environment.
"""

from __future__ import annotations

import argparse
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from dynamo_trtllm.config.base import GROUPS, Config
from dynamo_trtllm.config.parser import CommandParser
from dynamo_trtllm.errors import ConfigError

_WORDS = "words"  # attribute in which argparse collects const flags
_TYPED_AS = "typed_as"  # attribute with the name under which each flag was typed, by field
_TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """The command-line flag of one field."""

    field: str
    names: tuple[str, ...]  # errors show the first
    group: str
    env: str | None  # well-known variable, read in addition to the DYN_TRTLLM_ one
    positional: bool
    kind: type  # bool, dict, int, float, Path or str
    choices: tuple[str, ...]
    const_flags: Mapping[str, str]  # flags without a value -> the value that each sets
    is_address: bool  # may contain a password

    def variables(self, prefix: str) -> list[str]:
        """Return the names of its environment variables with this prefix, one for each name of the flag."""
        return [variable(prefix, name) for name in (self.field, *self.names[1:])]

    def convert(self, text: str, source: str) -> Any:
        """Convert a text to a value for the model.

        Args:
            text: The value as typed or as in the environment.
            source: Source of the text, for errors.

        Raises:
            ConfigError: The text is empty, or not a bool or JSON object as required.
        """
        if not text.strip():
            raise ConfigError(f"{source} is empty; give a value or leave it out", field=self.field)
        if self.kind is bool:
            if text.lower() not in _TRUTH:
                raise ConfigError(f"{source} is {text!r}: expected true or false", field=self.field)
            return _TRUTH[text.lower()]
        if self.kind is dict:
            return _json_object(text, source, self.field)
        return text


def variable(prefix: str, flag: str) -> str:
    """Return the environment variable of a flag."""
    return prefix + flag.removeprefix("--").replace("-", "_").upper()


def flags_of(model: type[Config]) -> list[Flag]:
    """Return the flags of a model, in the order of its fields."""
    return [_flag(name, info) for name, info in model.model_fields.items()]


def _flag(name: str, info: FieldInfo) -> Flag:
    shown = dict(typing.cast("dict[str, Any]", info.json_schema_extra))  # from `option`
    aliases = shown.pop("aliases")
    kind, choices = _kind(info.annotation)
    names = (name.upper(),) if shown["positional"] else ("--" + name.replace("_", "-"), *aliases)
    return Flag(field=name, names=names, kind=kind, choices=choices, **shown)


def _kind(annotation: Any) -> tuple[type, tuple[str, ...]]:
    """Return the plain type inside Optional and Annotated, and its allowed words."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        return _kind(inner)
    if origin is typing.Annotated:
        return _kind(typing.get_args(annotation)[0])
    if origin is typing.Literal:
        return str, tuple(typing.get_args(annotation))
    if origin is not None:
        return typing.cast("type", origin), ()
    if issubclass(annotation, Enum):
        return str, tuple(str(member.value) for member in annotation)
    return typing.cast("type", annotation), ()


def _json_object(text: str, source: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as exc:
        raise ConfigError(
            f"{source} is {text!r}: expected a JSON object ({exc.msg} at column {exc.colno})", field=field
        ) from exc
    if not isinstance(value, dict):
        raise ConfigError(f'{source} is {text!r}: expected a JSON object like {{"key": 1}}', field=field)
    return value


class _Store(argparse.Action):
    """Stores the value of a flag. A second name of the flag is accepted only with the same value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        typed_as: dict[str, str | None] = vars(namespace).setdefault(_TYPED_AS, {})
        earlier = typed_as.setdefault(self.dest, option_string)
        if earlier != option_string and (other := getattr(namespace, self.dest)) != values:
            raise ConfigError(
                f"{earlier} {other} and {option_string} {values} set the same and contradict each other; remove one of "
                "them",
                field=self.dest,
            )
        setattr(namespace, self.dest, values)


def build_parser(model: type[Config], *, prog: str, description: str, version: str, env_prefix: str) -> CommandParser:
    """Build the argument parser of a model. It leaves values as text, and sets no attribute for an absent flag."""
    flags = flags_of(model)
    required = [flag for flag in flags if model.model_fields[flag.field].is_required()]
    parser = CommandParser(
        prog=prog,
        usage=" ".join(["%(prog)s", *map(_usage, required), "[flags]"]),
        description=description,
        epilog=model.examples
        + f"Every flag can be set by an environment variable: --log-level by {env_prefix}LOG_LEVEL. Flags win.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dynamo_trtllm {version}")
    parser.add_argument("--print-config", action="store_true", help="Print each setting, its value and source; exit.")
    for title in GROUPS:
        if in_group := [flag for flag in flags if flag.group == title]:
            group = parser.add_argument_group(title)
            for flag in in_group:
                action = _add(group, flag, model.model_fields[flag.field])
                if flag.choices or flag.kind is Path:
                    parser.values[action] = flag.choices
    return parser


def _usage(flag: Flag) -> str:
    return flag.field.upper() if flag.positional else f"{flag.names[0]} {flag.field.upper()}"


def _add(group: argparse._ArgumentGroup, flag: Flag, info: FieldInfo) -> argparse.Action:
    """Add the arguments of a flag, and return the one that takes its value."""
    metavar = {int: "INT", float: "NUMBER", dict: "JSON"}.get(flag.kind, flag.field.upper())
    if flag.choices:
        metavar = "{" + ",".join(flag.choices) + "}"
    help_text = _help(flag, info).replace("%", "%%")
    if flag.positional:
        action = group.add_argument(flag.field, metavar=metavar, help=help_text, nargs="?")
    elif flag.kind is bool:
        switch = argparse.BooleanOptionalAction
        action = group.add_argument(*flag.names, dest=flag.field, action=switch, help=help_text)
    else:
        names = flag.names
        action = group.add_argument(*names, dest=flag.field, metavar=metavar, help=help_text, action=_Store)
    for word, value in flag.const_flags.items():
        group.add_argument(
            word, dest=_WORDS, action="append_const", const=(flag.field, word, value), help=f"{flag.names[0]} {value}"
        )
    return action


def _help(flag: Flag, info: FieldInfo) -> str:
    notes = []
    if info.is_required():
        notes.append("required")
    elif info.default is not None:
        default = info.default.value if isinstance(info.default, Enum) else info.default
        notes.append(f"default: {default}")
    if flag.env:
        notes.append(f"also {flag.env}")
    return f"{info.description}" + (f" ({'; '.join(notes)})" if notes else "")


RejectUnknown = Callable[[str | None, Sequence[str], Sequence[str]], None]
"""Rejects unknown words. Takes the value of the positional argument, the unknown words, and the known flags."""


def read_flags(
    parser: argparse.ArgumentParser, model: type[Config], argv: Sequence[str], reject_unknown: RejectUnknown
) -> dict[str, Any]:
    """Read the flags in `argv`.

    Args:
        parser: Parser from `build_parser`.
        model: The same model.
        argv: Command line without the program name.
        reject_unknown: Called with the words that the parser does not know.

    Returns:
        (flag name, value) by field for the flags given, and a bool under `print_config`.

    Raises:
        ConfigError: A word is unknown, a value is malformed, or two flags contradict each other.
        SystemExit: For `--help` and `--version`.
    """
    namespace, unknown = parser.parse_known_args(list(argv))
    given = vars(namespace)
    positional = next((given.get(flag.field) for flag in flags_of(model) if flag.positional), None)
    reject_unknown(positional, unknown, [name for name in parser._option_string_actions if name.startswith("--")])
    typed: dict[str, Any] = {"print_config": given.pop("print_config", False)}
    typed_as = given.pop(_TYPED_AS, {})
    for flag in flags_of(model):
        if flag.field in given and given[flag.field] is not None:
            value = given[flag.field]
            name = typed_as.get(flag.field, flag.names[0])
            typed[flag.field] = (name, value if isinstance(value, bool) else flag.convert(value, f"flag {name}"))
    words = {word for flag in flags_of(model) for word in flag.const_flags}
    for field, word, value in given.get(_WORDS, ()):
        earlier, other = typed.setdefault(field, (word, value))
        if other != value:
            shown = earlier if earlier in words else f"{earlier} {other}"
            raise ConfigError(f"{word} and {shown} contradict each other; remove one of them", field=field)
    return typed
