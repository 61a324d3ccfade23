"""Turn the fields of a config model into command-line flags and an argparse parser.

The caller passes argv; the module does not read the environment.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from dynamo_trtllm import __version__
from dynamo_trtllm.config.config_base import GROUPS, Config
from dynamo_trtllm.config.parser import CommandParser
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.number_text import NUMBER_RULE, is_number_of_python_only

ENV_PREFIX = "DYN_TRTLLM_"
_TRUTH = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """The command-line flag of one field."""

    field: str
    names: tuple[str, ...]  # the first one is shown in errors, the others are aliases
    group: str
    env: tuple[str, ...]  # well-known variables, read in addition to the DYN_TRTLLM_ one
    positional: bool
    kind: type  # bool, dict, int, float, tuple, Path or str
    is_number: bool  # the value is a number, or a list of numbers
    choices: tuple[str, ...]  # allowed or usual words
    const_flags: Mapping[str, str]  # flags without a value, and the value that each sets
    is_address: bool  # may contain a password
    is_secret: bool  # is never printed

    def variables(self) -> list[str]:
        """Return the names of its DYN_TRTLLM_ variables, one for each name of the flag."""
        long_names = [name for name in self.names[1:] if name.startswith("--")]
        return list(dict.fromkeys(map(variable, (self.field, *long_names))))

    def convert(self, text: str, source: str) -> Any:
        """Convert a text to a value for the model.

        Args:
            text: the value as typed or as in the environment.
            source: source of the text, for errors.

        Raises:
            ConfigError: the text is empty, or not a bool, JSON object or number as required.
        """
        if not text.strip():
            raise ConfigError(f"{source} is empty; give a value or leave it out", field=self.field)
        if self.kind is bool:
            word = text.lower()
            if word not in _TRUTH:
                raise ConfigError(f"{source} is {text!r}: expected true or false", field=self.field)
            return _TRUTH[word]
        if self.kind is dict:
            return _json_object(text, source, self.field)
        if self.is_number and any(map(is_number_of_python_only, text.split(","))):
            raise ConfigError(f"{source} is {text!r}: {NUMBER_RULE}", field=self.field)
        if self.kind is tuple:
            return tuple(part.strip() for part in text.split(","))
        return text


def variable(flag: str) -> str:
    """Return the environment variable of a flag."""
    return ENV_PREFIX + flag.removeprefix("--").replace("-", "_").upper()


@functools.cache
def flags_of(model: type[Config]) -> tuple[Flag, ...]:
    """Return the flags of a model, in the order of its fields."""
    return tuple(_flag(name, info) for name, info in model.model_fields.items())


def _flag(name: str, info: FieldInfo) -> Flag:
    # `option` stores its arguments here.
    given = typing.cast("dict[str, Any]", info.json_schema_extra)
    kind, choices = _kind(info.annotation)
    choices = choices or tuple(given["words"])
    if given["positional"]:
        names = [name.upper(), *given["aliases"]]
    else:
        names = ["--" + name.replace("_", "-"), *given["aliases"]]
    return Flag(
        field=name,
        names=tuple(names),
        group=given["group"],
        env=tuple(given["env"]),
        positional=given["positional"],
        kind=kind,
        is_number=_has_numbers(info.annotation),
        choices=choices,
        const_flags=given["const_flags"],
        is_address=given["is_address"],
        is_secret=given["is_secret"],
    )


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


def _has_numbers(annotation: Any) -> bool:
    """Return True if values of a type are numbers, or lists of numbers."""
    parts = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _has_numbers(parts[0])
    if origin in (typing.Union, types.UnionType, tuple):
        return any(map(_has_numbers, parts))
    return annotation in (int, float)


def _json_object(text: str, source: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except RecursionError as exc:
        raise ConfigError(
            f"{source} is nested too deep: expected a JSON object", field=field
        ) from exc
    except json.JSONDecodeError as exc:
        raise ConfigError(
            f"{source} is {text!r}: expected a JSON object ({exc.msg} at column {exc.colno})",
            field=field,
        ) from exc
    except ValueError as exc:  # a whole number of more than 4,300 digits
        raise ConfigError(f"{source} can't be read: {exc}", field=field) from exc
    if not isinstance(value, dict):
        raise ConfigError(
            f'{source} is {text!r}: expected a JSON object like {{"key": 1}}', field=field
        )
    return value


class _Given(NamedTuple):
    """A value from the command line."""

    value: str
    text: str  # the text that was typed, with the flag


class _Store(argparse.Action):
    """Stores, for each name of a flag, the last value that was given under it.

    It rejects different values under two names.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or self.dest.upper()
        if self.const:
            value = self.const
            text = flag
        else:
            value = values
            text = f"{flag} {value}"
        given: dict[str, _Given] = vars(namespace).setdefault(self.dest, {})
        for earlier_flag, earlier in given.items():
            if earlier_flag != flag and earlier.value != value:
                raise ConfigError(
                    f"{earlier.text} and {text} set the same and contradict each other; remove one"
                    " of them",
                    field=self.dest,
                )
        given[flag] = _Given(value, text)


class _Switch(argparse.BooleanOptionalAction):
    """A flag that is on or off: --x or --no-x."""

    def hide_off(self) -> None:
        """Leave --no-x out of the help. Call it once the parser has both forms."""
        self.option_strings = [name for name in self.option_strings if not name.startswith("--no-")]

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, not str(option_string).startswith("--no-"))


class _Append(argparse.Action):
    """Stores all values of a flag that may be repeated, each with the name that was typed."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        vars(namespace).setdefault(self.dest, []).append((option_string, values))


def build_parser(model: type[Config], prog: str, description: str = "") -> CommandParser:
    """Build the argument parser of a model.

    It leaves values as text, and sets no attribute for an absent flag.

    Args:
        model: class of the settings.
        prog: command, for the usage line.
        description: one sentence. Default: the first line of the docstring of `model`.
    """
    first_line, _, examples = inspect.cleandoc(model.__doc__ or "").partition("\n\n")
    flags = flags_of(model)
    required = [flag for flag in flags if model.model_fields[flag.field].is_required()]
    epilog = "\n".join(part for part in (examples, _about_flags(flags)) if part)
    parser = CommandParser(
        prog=prog,
        usage=" ".join(["%(prog)s", *map(_usage, required), "[flags]"]),
        description=description or first_line,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dynamo_trtllm {__version__}")
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="Print each setting, its value and source; exit.",
    )
    for title in GROUPS:
        in_group = [flag for flag in flags if flag.group == title]
        if not in_group:
            continue
        group = parser.add_argument_group(title)
        for flag in in_group:
            action = _add(group, flag, model.model_fields[flag.field])
            if flag.choices or flag.kind is Path:
                parser.values[action] = flag.choices  # for the completion of a shell
    return parser


def _about_flags(flags: Sequence[Flag]) -> str:
    """Return what `--help` says of all flags, with one of the command as the example."""
    named = {flag.field: flag for flag in flags if not flag.positional}
    if not named:
        return ""
    example = named.get("log_level") or next(iter(named.values()))
    return (
        f"Every flag can be set by an environment variable: {example.names[0]} by"
        f" {variable(example.field)}. Flags win. --help=WORD shows only the flags with this word."
    )


def _usage(flag: Flag) -> str:
    value = flag.field.upper()
    return value if flag.positional else f"{flag.names[0]} {value}"


def _add(group: argparse._ArgumentGroup, flag: Flag, info: FieldInfo) -> argparse.Action:
    """Add the arguments of a flag, and return the one that takes its value."""
    help_text = _help_text(flag, info)
    metavar = {int: "INT", float: "NUMBER", dict: "JSON"}.get(flag.kind, flag.field.upper())
    if flag.choices:
        metavar = "{" + ",".join(flag.choices) + "}"
    if flag.positional:
        action = group.add_argument(
            flag.field, metavar=metavar, action=_Store, nargs="?", help=help_text
        )
        if flag.names[1:]:
            group.add_argument(
                *flag.names[1:],
                dest=flag.field,
                metavar=metavar,
                action=_Store,
                help=f"The same as {metavar}.",
            )
        return action
    if flag.kind is bool:
        switch = group.add_argument(*flag.names, dest=flag.field, action=_Switch, help=help_text)
        if isinstance(switch, _Switch) and info.default is False:
            # --no-x changes something only if an environment variable has turned the flag on.
            switch.hide_off()
        return switch
    store = _Append if flag.kind is tuple else _Store
    action = group.add_argument(
        *flag.names, dest=flag.field, metavar=metavar, action=store, help=help_text
    )
    for word, value in flag.const_flags.items():
        meaning = f"{flag.names[0]} {value}"
        group.add_argument(word, dest=flag.field, action=_Store, nargs=0, const=value, help=meaning)
    return action


def _help_text(flag: Flag, info: FieldInfo) -> str:
    """Return the text of a flag in `--help`, with its default and variables."""
    notes = []
    if info.is_required():
        notes.append("required")
    elif info.default is not None and info.default != ():
        notes.append(f"default: {info.default}")
    if flag.env:
        notes.append(f"also {', '.join(flag.env)}")
    text = info.description or ""
    if notes:
        text += f" ({'; '.join(notes)})"
    # argparse formats help texts with the % operator.
    return text.replace("%", "%%")


def read_flags(model: type[Config], given: argparse.Namespace) -> dict[str, tuple[Any, str]]:
    """Return value and source by field of the flags that `build_parser` has parsed.

    Raises:
        ConfigError: a value is malformed.
    """
    read: dict[str, tuple[Any, str]] = {}
    for flag in flags_of(model):
        match getattr(given, flag.field, None):
            case bool(value):  # from `_Switch`
                read[flag.field] = (value, f"flag {flag.names[0]}")
            case list(all_typed):  # from `_Append`
                values: list[str] = []
                for name, text in all_typed:
                    source = f"flag {name}"
                    values.extend(flag.convert(text, source))
                # The values are checked together, so the last name stands for all.
                read[flag.field] = (tuple(values), source)
            case dict(typed):  # from `_Store`, by name of the flag
                # All names have the same value, so the last one stands for all.
                name = list(typed)[-1]
                source = f"flag {name}"
                read[flag.field] = (flag.convert(typed[name].value, source), source)
    return read
