"""Convert the annotations in manifests to types that pydantic checks, and describe these for error
texts.

A class whose fields have an entry of their own in the manifest (`…Config`) is a mapping here:
`argument_schema` checks its keys. A class that no manifest describes accepts every value, and so
does an annotation that was not read.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from dynamo_trtllm.engines.manifests import ApiManifest

# Names in annotations that are Python types of YAML values.
_PLAIN: dict[Any, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "Path": str,
    "list": list[Any],
    "dict": dict[Any, Any],
    "None": None,
}
_UNREAD = "<unread>"  # in manifests, in place of an annotation
# No conversions: "3" and true are not whole numbers.
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_MAPPING = "a mapping (key: value)"
_DESCRIPTIONS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    list: "a list",
    dict: _MAPPING,
}


class Openness(NamedTuple):
    """Which lists of words may have more words than the manifest."""

    literals: bool = False
    enums: frozenset[str] = frozenset()


_CLOSED = Openness()


@functools.cache
def config_classes(annotation: str) -> tuple[str, ...]:
    """Return the names of the classes that describe the keys of a mapping.

    Args:
        annotation: text in the manifest, such as "Optional[KvCacheConfig]".
    """
    names = [node.id for node in _alternatives(_parsed(annotation)) if isinstance(node, ast.Name)]
    return tuple(name for name in names if name.endswith("Config"))


@functools.cache
def value_type(annotation: str, release: ApiManifest, openness: Openness = _CLOSED) -> Any:
    """Return the Python type of the values of an argument.

    Args:
        annotation: text in the manifest.
        release: API of the library, which has the members of enumerations.
        openness: lists of words in whose place every text fits.
    """
    nodes = _alternatives(_parsed(annotation))
    members = [
        node.id for node in nodes if isinstance(node, ast.Name) and _members(node.id, release)
    ]
    # With an enumeration, str is left out: a value of Union[str, LoadFormat] must be one of the
    # members of LoadFormat.
    kept = [
        node for node in nodes if not (members and isinstance(node, ast.Name) and node.id == "str")
    ]
    return Union[tuple(_single(node, release, openness) for node in kept)]  # noqa: UP007 - the number of types is not fixed


def fits(value: Any, annotation: str, release: ApiManifest) -> bool:
    """Return True if an argument may have this value."""
    try:
        _adapter(annotation, release).validate_python(value)
    except ValidationError:
        return False
    return True


def may_fit(value: Any, annotation: str, release: ApiManifest, *, is_in_part: bool) -> bool:
    """Return True if the library may accept a value that does not fit, because not all words of the
    build were read.

    False for a listed word in another case: that is a misspelling.

    Args:
        value: a value for which `fits` returns False.
        annotation: text in the manifest.
        release: API of the library, which knows the enumerations of which not all members were
            read.
        is_in_part: only a part of the argument's class was read, and so of the words in its
            annotations.
    """
    openness = Openness(literals=is_in_part, enums=release.open_enums)
    try:
        _adapter(annotation, release, openness).validate_python(value)
    except ValidationError:
        return False
    words = [
        word
        for alternative in _union(value_type(annotation, release))
        for word in _words_of(alternative)
    ]
    return str(value).casefold() not in {str(word).casefold() for word in words}


def description(annotation: str, release: ApiManifest) -> str:
    """Return what an argument may be, as text: "a whole number or null"."""
    texts = [_described(alternative) for alternative in _union(value_type(annotation, release))]
    return " or ".join(dict.fromkeys(texts))


@functools.cache
def _adapter(
    annotation: str, release: ApiManifest, openness: Openness = _CLOSED
) -> TypeAdapter[Any]:
    return TypeAdapter(value_type(annotation, release, openness), config=_STRICT)


@functools.cache
def _parsed(annotation: str) -> ast.expr:
    return ast.parse("object" if annotation == _UNREAD else annotation, mode="eval").body


def _alternatives(node: ast.expr) -> list[ast.expr]:
    """Return the members of a union: Optional[Union[str, LoadFormat]] has str, LoadFormat and
    None.
    """
    outer = _outer_name(node)
    if outer not in ("Optional", "Union"):
        return [node]
    found = [alternative for inner in _inner(node) for alternative in _alternatives(inner)]
    if outer == "Optional":
        found.append(ast.Name("None"))
    return found


def _outer_name(node: ast.expr) -> str:
    """Return `List` for List[int]; "" for an annotation without brackets."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return node.value.id
    return ""


def _inner(node: ast.expr) -> Sequence[ast.expr]:
    assert isinstance(node, ast.Subscript)
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def _single(node: ast.expr, release: ApiManifest, openness: Openness) -> Any:
    """Return the type of one alternative."""
    outer = _outer_name(node)
    if outer == "Literal" and openness.literals:
        return str
    if outer == "Literal":
        words = tuple(ast.literal_eval(word) for word in _inner(node))
        return _one_of(words, ignores_case="Literal" in release.library.any_case)
    if outer == "List":
        return list[_single(_inner(node)[0], release, openness)]  # type: ignore[misc]
    if outer == "Dict":
        return dict[Any, Any]
    assert isinstance(node, ast.Name), ast.dump(node)
    if node.id in _PLAIN:
        return _PLAIN[node.id]
    if node.id.endswith("Config"):
        return dict[Any, Any]
    if node.id in openness.enums:
        return str
    if words := _members(node.id, release):
        return _one_of(words, ignores_case=node.id in release.library.any_case)
    return Any


def _members(name: str, release: ApiManifest) -> tuple[str, ...]:
    """Return the members of an enumeration; () for other names.

    For a class (`…Config`), `ApiManifest.values` has its subclasses, which are no members.
    """
    return () if name.endswith("Config") else release.values(name)


def _one_of(words: tuple[Any, ...], *, ignores_case: bool) -> Any:
    literal = Literal.__getitem__(words)  # the words are not known to a type checker
    if not ignores_case:
        return literal
    spelling = {str(word).casefold(): word for word in words}

    def as_listed(value: Any) -> Any:
        return spelling.get(value.casefold(), value) if isinstance(value, str) else value

    return Annotated[literal, BeforeValidator(as_listed)]


def _union(value: Any) -> tuple[Any, ...]:
    return get_args(value) if get_origin(value) is Union else (value,)


def _words_of(value: Any) -> tuple[Any, ...]:
    literal = get_args(value)[0] if get_origin(value) is Annotated else value
    return get_args(literal) if get_origin(literal) is Literal else ()


def _described(value: Any) -> str:
    if words := _words_of(value):
        return f"one of {', '.join(map(str, words))}"
    if get_origin(value) is list and get_args(value) != (Any,):
        (item,) = get_args(value)
        return f"a list of {getattr(item, '__name__', 'values')}"
    return _DESCRIPTIONS.get(get_origin(value) or value, _MAPPING)
