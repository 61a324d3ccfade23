"""Write docs/reference-python.md from the docstrings of the public names.

`python -m scripts.python_reference` runs it. A test compares the page with this output.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
import textwrap
import typing
from collections.abc import Iterator
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import dynamo_trtllm
from dynamo_trtllm.config.config_base import Config
from scripts.config_reference import table

PAGE = Path(__file__).parents[1] / "docs" / "reference-python.md"
_HEAD = """\
# Python reference

<!-- written by `python -m scripts.python_reference`; a test compares -->

These are the names that programs import from `dynamo_trtllm`. [Embed workers and
frontends](embedding.md) shows how they are used. Names with a leading underscore, and names of
other modules, may change in any release.
"""
_SECTION = re.compile(r"(Args|Attributes|Returns|Raises):")
_ENTRY = re.compile(r"([\w.*, ]+): (.*)")
# Programs get objects of these classes, and do not create them.
_GIVEN = ("EmbeddedDeployment", "FrontendRequest")
_MAX_DEFAULT_CHARS = 30
_EMPTY = {"dict": "{}", "list": "[]"}  # the defaults that these factories return
_SETTINGS = "[Configuration reference](reference-configuration.md) lists its fields, as flags."


def page() -> str:
    """Return the page."""
    parts = [_HEAD]
    for name in sorted(dynamo_trtllm.__all__, key=str.lower):
        parts.append(f"## {name}\n")
        parts += _described(name, getattr(dynamo_trtllm, name))
    return "\n".join(parts)


def _described(name: str, public: Any) -> Iterator[str]:
    if typing.get_origin(public) is not None:
        yield from _alias(name)
        return
    if not inspect.isclass(public):
        yield from _function(name, public)
        return
    if issubclass(public, Config):
        lead, _, _ = inspect.cleandoc(public.__doc__ or "").partition("\n\n")
        yield f"{lead}\n"
        yield f"{_SETTINGS}\n"
        return
    yield markdown(public.__doc__ or "")
    if issubclass(public, Enum):
        yield table(("member", "value"), [(f"`{m.name}`", f"`{m.value}`") for m in public])
        return
    fields = list(_fields(public))
    if fields:
        yield table(("field", "type", "default", "meaning"), fields)
    elif "__init__" in vars(public) and name not in _GIVEN:
        yield from _function(name, public)
    for member, value in _members(public):
        title = f"{name}.{member}"
        if isinstance(value, property):
            yield f"### {title}\n"
            yield markdown(value.__doc__ or "")
        else:
            yield f"### {title}\n"
            yield from _function(title, value)


def _alias(name: str) -> Iterator[str]:
    """Yield the definition of a type alias, and the docstring below it."""
    for module in sys.modules.values():
        if not module.__name__.startswith("dynamo_trtllm") or name not in vars(module):
            continue
        statements = ast.parse(inspect.getsource(module)).body
        for statement, following in itertools.pairwise(statements):
            if not (isinstance(statement, ast.AnnAssign) and statement.value is not None):
                continue
            if ast.unparse(statement.target) == name:
                assert isinstance(following, ast.Expr)
                yield f"```text\n{name} = {ast.unparse(statement.value)}\n```\n"
                yield markdown(ast.literal_eval(following.value))
                return


def _function(title: str, function: Any) -> Iterator[str]:
    documented = function.__init__ if inspect.isclass(function) else function
    yield f"```text\n{_signature(title, documented)}\n```\n"
    yield markdown(documented.__doc__ or "")


def _members(public: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties, in source order.

    Those of base classes are included if they are of this project.
    """
    seen = set()
    for base in public.__mro__:
        if not base.__module__.startswith("dynamo_trtllm"):
            continue
        for name, value in vars(base).items():
            function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            is_member = inspect.isfunction(function) or isinstance(function, property)
            if is_member and not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, function


def _fields(public: type) -> Iterator[tuple[str, str, str, str]]:
    """Yield the fields of a record: name, type, default, and the comment that explains it."""
    if not (hasattr(public, "__struct_fields__") or hasattr(public, "__dataclass_fields__")):
        return
    source = textwrap.dedent(inspect.getsource(public))
    lines = source.splitlines()
    (parsed,) = ast.parse(source).body
    assert isinstance(parsed, ast.ClassDef)
    for node in parsed.body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        kind = re.sub(r"\b_[A-Z]\w*", partial(_base_type, public), ast.unparse(node.annotation))
        default = "required" if node.value is None else _default(node.value)
        yield f"`{node.target.id}`", f"`{kind}`", default, _comment(lines, node)


def _base_type(public: type, alias: re.Match[str]) -> str:
    """Return the type that a private alias limits, such as `int` for a number in some range."""
    (base, *_) = typing.get_args(getattr(sys.modules[public.__module__], alias[0]))
    return str(base.__name__)


def _default(value: ast.expr) -> str:
    """Return the default of a field, as Markdown."""
    if not isinstance(value, ast.Call):
        return f"`{ast.unparse(value)}`"
    arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in value.keywords}
    if "default" in arguments:
        return f"`{arguments['default']}`"
    if "default_factory" in arguments:
        factory = arguments["default_factory"]
        return f"`{_EMPTY.get(factory, f'{factory}()')}`"
    return "required"


def _comment(lines: list[str], node: ast.AnnAssign) -> str:
    """Return the comment above a field, or at its end."""
    above = []
    number = node.lineno - 2  # index of the line before the field
    while lines[number].strip().startswith("#"):
        above.insert(0, lines[number].strip().lstrip("# "))
        number -= 1
    assert node.end_lineno is not None
    _, _, behind = lines[node.end_lineno - 1].partition("  # ")
    return " ".join([*above, behind]).strip()


def _signature(title: str, function: Any) -> str:
    """Return a signature without `self`, with annotations as in the source."""
    signature = inspect.signature(function)
    words = []
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(_parameter(parameter))
    returned = signature.return_annotation
    end = "" if returned in ("None", signature.empty) else f" -> {returned}"
    prefix = "await " if inspect.iscoroutinefunction(function) else ""
    one_line = f"{prefix}{title}({', '.join(words)}){end}"
    if len(one_line) <= 100:
        return one_line
    lines = [f"    {word}," for word in words]
    return "\n".join([f"{prefix}{title}(", *lines, f"){end}"])


def _parameter(parameter: inspect.Parameter) -> str:
    text = f"{parameter.name}: {parameter.annotation}"
    if parameter.default is parameter.empty:
        return text
    default = repr(parameter.default)
    return f"{text} = {default if len(default) <= _MAX_DEFAULT_CHARS else '...'}"


def markdown(docstring: str) -> str:
    """Return a docstring as Markdown, with its sections as lists."""
    lines: list[str] = []
    is_in_section = False
    for line in inspect.cleandoc(docstring).splitlines():
        section = _SECTION.fullmatch(line)
        if section:
            is_in_section = True
            lines += [f"{section[1]}:", ""]
            continue
        if line and not line.startswith(" "):
            is_in_section = False
        if not is_in_section:
            lines.append(line)
            continue
        entry = _ENTRY.fullmatch(line[4:])
        if entry:
            lines.append(f"* `{entry[1]}`: {entry[2]}")
        else:
            lines.append(f"  {line.strip()}" if line else "")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
