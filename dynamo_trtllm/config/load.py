"""Load settings from defaults, environment and flags.

No other module reads argv or os.environ.

Flags override the environment, and the environment overrides defaults. The source of each value is
stored. Each error is a ConfigError whose message has one line.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError

from dynamo_trtllm.config import commands, dynamo_variables
from dynamo_trtllm.config.child_settings import text_of
from dynamo_trtllm.config.config_base import DEFAULT_SOURCE, Config, ConnectionConfig
from dynamo_trtllm.config.environ import command_line
from dynamo_trtllm.config.flags import (
    ENV_PREFIX,
    Flag,
    build_parser,
    flags_of,
    read_flags,
    variable,
)
from dynamo_trtllm.config.ignored_variables import ignored
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.config.parser import COMMAND_NAME
from dynamo_trtllm.config.suggestions import suggest
from dynamo_trtllm.config.text_table import format_table
from dynamo_trtllm.config.unknown_flags import reject_unknown, without_no_op_flags
from dynamo_trtllm.protocol.errors import ConfigError, DynamoError
from dynamo_trtllm.protocol.sanitize import (
    MASK,
    escape_controls,
    mask_address,
    mask_credentials,
)

C = TypeVar("C", bound=Config)

log = logging.getLogger(__name__)
_OTLP_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
# This variable is set if the parent has logged the ignored variables. It is not a setting, so its
# name does not begin with DYN_TRTLLM_.
_IGNORED_ARE_LOGGED = "DYNAMO_TRTLLM_VARIABLES_NAMED"


def load(
    model: type[C],
    *,
    prog: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    extra_text: Callable[[C], str] | None = None,
    others: Sequence[type[Config]] = (),
) -> C:
    """Load the settings of a process. `source_of` of the result returns the source of a setting.

    Args:
        model: class of the settings.
        prog: command, for the usage line of `--help`. If the user has typed `dynamo-trtllm
            COMMAND`, this is shown instead.
        argv: command line without the program name. Default: the command line of this process.
        environ: environment variables. Default: the environment of this process.
        extra_text: returns the text that `--print-config` prints below the settings.
        others: classes of settings of other processes. The command accepts their flags, too, so the
            error for an unknown flag may suggest one of them.

    Raises:
        ConfigError: a flag, variable or value is not valid.
        SystemExit: with status 0 after `--help`, `--version` and `--print-config`.
    """
    if argv is None:
        prog = program(prog)
        argv = command_line()
    env = os.environ if environ is None else environ
    parser = build_parser(model, prog)
    given, unknown = parser.parse_known_args(list(argv))
    reject_unknown(model, given, without_no_op_flags(model, unknown), parser, others)
    flags = read_flags(model, given)
    config = _validate(model, _from_environment(model, env, flags) | flags)
    _check_servers(config)
    if hasattr(given, "print_config"):
        sys.stdout.write(config_table(config))
        note = ignored_variables(env, config)
        if note:
            sys.stdout.write(f"note: {note}\n")
        if extra_text is not None:
            sys.stdout.write(extra_text(config))
        raise SystemExit(0)
    return config


def _check_servers(config: Config) -> None:
    """Reject addresses within this process, where a command can't reach a worker or frontend.

    Raises:
        ConfigError: a setting has such an address. The error names the setting.
    """
    if not isinstance(config, ConnectionConfig):
        return
    if config.uses_memory_discovery:
        raise _within_process(config, "etcd_endpoints", "an etcd server")
    if config.uses_inproc_plane:
        raise _within_process(config, "nats_server", "a NATS server")


def _within_process(config: ConnectionConfig, field: str, server: str) -> ConfigError:
    return ConfigError(
        f"{config.source_of(field)} is {getattr(config, field)!r}, which connects workers and"
        " frontends of one Python program (see docs/embedding.md), and no other process; give the"
        f" address of {server}",
        field=field,
    )


def program(prog: str) -> str:
    """Return the name of this program in messages.

    It is `dynamo-trtllm COMMAND` if that was typed, otherwise `prog`.
    """
    typed = sys.argv[0] if sys.argv else ""
    return typed if typed.startswith(f"{COMMAND_NAME} ") else prog


def exit_with(prog: str, error: ConfigError) -> NoReturn:
    """Print a ConfigError as one line on stderr, and exit with status 2."""
    line = " ".join(error.message.split())
    sys.stderr.write(f"{program(prog)}: {escape_controls(line)}\n")
    raise SystemExit(2) from error


@contextmanager
def command_errors(prog: str, *failures: type[Exception]) -> Iterator[None]:
    """End a command with a status if it raises an error in this context.

    One line is written instead of a traceback.

    Args:
        prog: command, see `load`.
        failures: errors that end the command with their `exit_status`, or else with 1. Any other
            DynamoError is logged, and ends the command with 1.

    Raises:
        SystemExit: there was an error. The status is 2 after a ConfigError, and 130 after Ctrl-C.
    """
    try:
        yield
    except ConfigError as exc:
        exit_with(prog, exc)
    except failures as exc:
        sys.stderr.write(f"{program(prog)}: {escape_controls(str(exc))}\n")
        raise SystemExit(getattr(exc, "exit_status", 1)) from exc
    except DynamoError as exc:
        log.error("%s: %s", exc.code, exc.message)
        raise SystemExit(1) from exc
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def command(
    model: type[C],
    prog: str,
    *failures: type[Exception],
    extra_text: Callable[[C], str] | None = None,
) -> Callable[[Callable[[C], int | None]], Callable[..., NoReturn]]:
    """Return a decorator that makes a function of settings the `main` of a command.

    `main(argv)` loads the settings and calls the function. It exits with the status that the
    function returns, or with 0 if that is None. `load` describes `argv`. `command_errors` describes
    how errors end the command.

    Args:
        model: class of the settings.
        prog: command, see `load`.
        failures: errors that end the command, see `command_errors`.
        extra_text: text for `--print-config`, see `load`.
    """

    def decorate(run: Callable[[C], int | None]) -> Callable[..., NoReturn]:
        @functools.wraps(run)
        def main(argv: Sequence[str] | None = None) -> NoReturn:
            with command_errors(prog, *failures):
                status = run(load(model, prog=prog, argv=argv, extra_text=extra_text))
                raise SystemExit(0 if status is None else status)

        return main

    return decorate


def process_environment() -> dict[str, str]:
    """Return a copy of this process's environment, for children and for engines that read it."""
    return dict(os.environ)


def is_color_disabled() -> bool:
    """Return True if NO_COLOR is set to a non-empty value (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def config_table(config: Config) -> str:
    """Format field, value and source as a table. Passwords are masked."""
    rows = [("field", "value", "source")]
    for flag in flags_of(type(config)):
        shown = _shown(flag, getattr(config, flag.field))
        rows.append((flag.field, shown, config.source_of(flag.field)))
    return format_table(rows)


def _shown(flag: Flag, value: Any) -> str:
    """Return the value as it is shown to users."""
    if value is None:
        return "-"
    if flag.is_secret:
        return MASK if value else "-"
    text = text_of(value)
    return mask_address(text) if flag.is_address else mask_credentials(text)


def _from_environment(
    model: type[Config], env: Mapping[str, str], typed: Mapping[str, tuple[Any, str]]
) -> dict[str, tuple[Any, str]]:
    """Return the value and the source of each field that a variable sets.

    The DYN_TRTLLM_ variable of a flag overrides a well-known variable.

    Args:
        model: class of the settings.
        env: environment variables.
        typed: the fields that flags set. Their variables are not read.
    """
    _check_environment(model, env)
    # Values from files often end with a line break, such as those of Secrets and of --env-file. No
    # setting begins or ends with white space.
    env = {name: text.strip() for name, text in env.items()}
    env = _without_unusable_otel(model, env, typed)
    processes = _kinds(model, _engine(env, typed))
    values: dict[str, tuple[Any, str]] = {}
    for flag in flags_of(model):
        if flag.field in typed:
            continue
        given = {name: env[name] for name in flag.variables() if name in env}
        if not given:
            given = _well_known(flag, env, processes)
        if not given:
            continue
        if len(set(given.values())) > 1:
            raise ConfigError(
                f"environment {' and '.join(given)} set the same and contradict each other; unset"
                " one of them",
                field=flag.field,
            )
        name = next(iter(given))
        source = f"environment {name}"
        values[flag.field] = (flag.convert(given[name], source), source)
    return values


def _well_known(flag: Flag, env: Mapping[str, str], processes: AbstractSet[str]) -> dict[str, str]:
    """Return the well-known variables of a flag that are set, and that these processes read."""
    values: dict[str, str] = {}
    for name in flag.env:
        if name not in env or not dynamo_variables.is_read_by(name, processes):
            continue
        try:
            text = dynamo_variables.option_value(name, env[name])
        except ConfigError as exc:
            raise ConfigError(exc.message, field=flag.field) from exc
        if text is not None:
            values[name] = text
    return values


def _kinds(model: type[Config], engine: object) -> AbstractSet[str]:
    """Return the kinds of the processes with these settings, as `dynamo_variables` names them.

    Return none for the settings of other commands.
    """
    if issubclass(model, WorkerConfig):
        return {dynamo_variables.WORKER, str(engine)}
    if issubclass(model, FrontendConfig):
        return {dynamo_variables.FRONTEND}
    return set()


def _engine(env: Mapping[str, str], typed: Mapping[str, tuple[Any, str]]) -> object:
    if "engine" in typed:
        value, _ = typed["engine"]
        return value
    return env.get(f"{ENV_PREFIX}ENGINE")


def ignored_variables(env: Mapping[str, str], *configs: Config) -> str:
    """Return a line that names the DYN_ variables that these processes do not read, or ""."""
    processes: set[str] = set()
    for config in configs:
        processes |= _kinds(type(config), getattr(config, "engine", None))
    return ignored(
        env,
        known=_read_by(_settings_of_commands()),
        read=_read_by(map(type, configs)),
        processes=processes,
    )


def warn_of_ignored_variables(*configs: Config) -> None:
    """Log the line of `ignored_variables`, unless the parent of this process has logged it."""
    if _IGNORED_ARE_LOGGED in os.environ:
        return
    line = ignored_variables(os.environ, *configs)
    if line:
        log.warning("%s", line)


def child_environment() -> dict[str, str]:
    """Return the environment for children, which must not log `ignored_variables` again."""
    return process_environment() | {_IGNORED_ARE_LOGGED: "1"}


def _settings_of_commands() -> list[type[Config]]:
    """Return the classes of the settings of all commands."""
    classes = [value for value in vars(commands).values() if isinstance(value, type)]
    return [cls for cls in classes if issubclass(cls, Config)]


def _read_by(models: Iterable[type[Config]]) -> set[str]:
    """Return the variables that the processes with these settings read."""
    names: set[str] = set()
    for model in models:
        for flag in flags_of(model):
            names.update(flag.variables())
            names.update(flag.env)
    return names


def _without_unusable_otel(
    model: type[Config], env: Mapping[str, str], typed: Mapping[str, tuple[Any, str]]
) -> Mapping[str, str]:
    """Return the environment without empty OTEL_ variables, and without all if one can't be used.

    This is not an error, because clusters set these variables for other programs in a pod.
    """
    flags: dict[str, Flag] = {}
    for flag in flags_of(model):
        for name in flag.env:
            if name.startswith("OTEL_"):
                flags[name] = flag
    env = {name: text for name, text in env.items() if name not in flags or text.strip()}
    without_otel = {name: text for name, text in env.items() if name not in flags}
    is_off = env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if is_off:
        return without_otel
    problem = ""
    for name, flag in flags.items():
        is_overridden = flag.field in typed or any(own in env for own in flag.variables())
        if name in env and not is_overridden:
            found = _otel_problem(model, flag, name, env)
            if found:
                problem = found
    if not problem:
        return env
    log.warning(
        "%s; no OTEL_ variable is used, and no traces are sent without --otlp-endpoint", problem
    )
    return without_otel


def _otel_problem(model: type[Config], flag: Flag, name: str, env: Mapping[str, str]) -> str:
    """Return why the OTEL_ variable `name` can't be used for a flag, or "" if it can."""
    protocol = env.get(_OTLP_PROTOCOL, "").strip()
    if flag.field == "otlp_endpoint" and protocol and not protocol.startswith("http/"):
        return f"environment {_OTLP_PROTOCOL} is {protocol!r}: only OTLP over HTTP is supported"
    try:
        _validate(model, {flag.field: (env[name], f"environment {name}")})
    except ConfigError as exc:
        return exc.message
    return ""


def _check_environment(model: type[Config], env: Mapping[str, str]) -> None:
    """Reject unknown DYN_TRTLLM_ variables.

    The variables of all commands are known, because processes share environments.
    """
    names = sorted(name for name in env if name.startswith(ENV_PREFIX))
    if not names:
        return
    known: set[str] = set()
    # A flag without a value has no variable. A user may still set a variable with such a name. This
    # has the text what to set instead, by that name.
    instead: dict[str, str] = {}
    for settings in dict.fromkeys([model, *_settings_of_commands()]):
        for flag in flags_of(settings):
            variables = flag.variables()
            known.update(variables)
            for const_flag, value in flag.const_flags.items():
                instead[variable(const_flag)] = f"set {variables[0]} to {value}"
    for name in names:
        if name in known or dynamo_variables.find(name) is not None:
            continue
        guess = suggest(name, known)
        if name in instead:
            hint = instead[name]
        elif guess:
            hint = f"did you mean {guess}?"
        else:
            hint = "unset it"
        raise ConfigError(f"unknown environment variable {name}; {hint}", field=name)


def _validate(model: type[C], given: Mapping[str, tuple[Any, str]]) -> C:
    """Return the checked config. `given`: value and source by field."""
    values = {name: value for name, (value, _) in given.items()}
    sources = {name: source for name, (_, source) in given.items()}
    try:
        config = model.model_validate(values)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        text = _problem(model, name, first, sources)
        num_more = exc.error_count() - 1
        if num_more:
            text += f" (and {num_more} more)"
        raise ConfigError(text, field=name or None) from exc
    return config.with_sources(dict.fromkeys(model.model_fields, DEFAULT_SOURCE) | sources)


def _problem(model: type[Config], name: str, error: Any, sources: Mapping[str, str]) -> str:
    """Return what is wrong with the field `name`, or with several fields if it is ""."""
    flags: dict[str, Flag] = {flag.field: flag for flag in flags_of(model)}
    if name not in flags:
        text = str(error["msg"]).removeprefix("Value error, ")
        return text + _set_by_variables(text, flags.values(), sources)
    flag = flags[name]
    if error["type"] == "missing":
        return f"{flag.names[0]} is missing; pass it, or set {ENV_PREFIX}{name.upper()}"
    message = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    return f"{sources[name]} is {_shown(flag, error['input'])!r}: {message}"


def _set_by_variables(text: str, flags: Iterable[Flag], sources: Mapping[str, str]) -> str:
    """Return which flags in a message were set by variables. The message names only the flags."""
    words = text.replace(";", " ").replace(",", " ").split()
    notes = []
    for flag in flags:
        source = sources.get(flag.field, "")
        if flag.names[0] in words and source.startswith("environment "):
            notes.append(f"{flag.names[0]} is set by {source}")
    return f" ({', '.join(notes)})" if notes else ""
