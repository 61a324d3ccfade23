"""Convert the annotations in manifests to types that pydantic checks, and describe these types in
error texts.

For this module, a class with a name like `KvCacheConfig` is a plain mapping: `argument_schema`
checks the keys of the mapping. An argument accepts every value if no manifest describes its class,
or if its annotation was not read.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from dynamo_trtllm.engines.manifests import ApiManifest

# The Python type of a value in YAML, by the name of the type in annotations.
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
_DESCRIPTIONS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    list: "a list",
    dict: "a mapping (key: value)",
}


class Openness(NamedTuple):
    """Which literals and enumerations may allow more values than the manifest lists."""

    literals: bool = False  # all literals
    enums: frozenset[str] = frozenset()  # names of enumerations


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
        openness: literals and enumerations of which not all values are known. Their type is str.
    """
    nodes = _alternatives(_parsed(annotation))
    has_enum = any(isinstance(node, ast.Name) and _members(node.id, release) for node in nodes)
    if has_enum:
        # A value of Union[str, LoadFormat] must be one of the members of LoadFormat. The type str
        # would allow other texts.
        nodes = [node for node in nodes if not _is_str(node)]
    return Union[tuple(_single(node, release, openness) for node in nodes)]  # noqa: UP007 - the number of types is not fixed


def _is_str(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "str"


def fits(value: Any, annotation: str, release: ApiManifest) -> bool:
    """Return True if an argument may have this value."""
    try:
        _adapter(annotation, release).validate_python(value)
    except ValidationError:
        return False
    return True


def may_fit(value: Any, annotation: str, release: ApiManifest, *, is_in_part: bool) -> bool:
    """Return True if the library may accept a value that does not fit, because the manifest does
    not have all allowed values.

    Return False if a listed value differs from this value only in upper and lower case, because
    this value is a misspelling.

    Args:
        value: a value for which `fits` returns False.
        annotation: text in the manifest.
        release: API of the library. Its `open_enums` are the enumerations that were read in part.
        is_in_part: only a part of the argument's class was read. The literals in its annotations
            may lack values.
    """
    openness = Openness(literals=is_in_part, enums=release.open_enums)
    try:
        _adapter(annotation, release, openness).validate_python(value)
    except ValidationError:
        return False
    listed = [
        str(listed_value).casefold()
        for alternative in _alternative_types(value_type(annotation, release))
        for listed_value in _listed_values(alternative)
    ]
    return str(value).casefold() not in listed


def description(annotation: str, release: ApiManifest) -> str:
    """Return what an argument may be, as text: "a whole number or null"."""
    alternatives = _alternative_types(value_type(annotation, release))
    texts = [_described(alternative) for alternative in alternatives]
    # This removes duplicates.
    return " or ".join(dict.fromkeys(texts))


@functools.cache
def _adapter(
    annotation: str, release: ApiManifest, openness: Openness = _CLOSED
) -> TypeAdapter[Any]:
    return TypeAdapter(value_type(annotation, release, openness), config=_STRICT)


@functools.cache
def _parsed(annotation: str) -> ast.expr:
    if annotation == _UNREAD:
        # `_single` converts a name that it does not know, such as this one, to Any.
        annotation = "object"
    return ast.parse(annotation, mode="eval").body


def _alternatives(node: ast.expr) -> list[ast.expr]:
    """Return the alternatives of a union: Optional[Union[str, LoadFormat]] has str, LoadFormat and
    None. An annotation that is not a union is its only alternative.
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
    """Return the parts between the brackets of an annotation."""
    assert isinstance(node, ast.Subscript)
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def _single(node: ast.expr, release: ApiManifest, openness: Openness) -> Any:
    """Return the type of one alternative."""
    outer = _outer_name(node)
    if outer == "Literal" and openness.literals:
        return str
    if outer == "Literal":
        values = tuple(ast.literal_eval(value) for value in _inner(node))
        # In `any_case`, the name "Literal" stands for all literals.
        return _one_of(values, ignores_case="Literal" in release.library.any_case)
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
    if members := _members(node.id, release):
        return _one_of(members, ignores_case=node.id in release.library.any_case)
    return Any


def _members(name: str, release: ApiManifest) -> tuple[str, ...]:
    """Return the members of an enumeration; () for other names.

    A class with a name like `KvCacheConfig` is no enumeration: for this name, `ApiManifest.values`
    has the subclasses of the class.
    """
    return () if name.endswith("Config") else release.values(name)


def _one_of(values: tuple[Any, ...], *, ignores_case: bool) -> Any:
    """Return the type of an argument that must be one of these values."""
    literal = Literal.__getitem__(values)  # the values are not known to a type checker
    if not ignores_case:
        return literal
    listed_by_lower_case = {str(value).casefold(): value for value in values}

    def as_listed(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return listed_by_lower_case.get(value.casefold(), value)

    return Annotated[literal, BeforeValidator(as_listed)]


def _alternative_types(value_type: Any) -> tuple[Any, ...]:
    """Return the types in a union; for another type, this type alone."""
    return get_args(value_type) if get_origin(value_type) is Union else (value_type,)


def _listed_values(value_type: Any) -> tuple[Any, ...]:
    """Return the values of a type from `_one_of`; () for other types."""
    literal = get_args(value_type)[0] if get_origin(value_type) is Annotated else value_type
    return get_args(literal) if get_origin(literal) is Literal else ()


def _described(value_type: Any) -> str:
    if values := _listed_values(value_type):
        return f"one of {', '.join(map(str, values))}"
    origin = get_origin(value_type)
    if origin is list and get_args(value_type) != (Any,):
        (item,) = get_args(value_type)
        # A literal has no name.
        return f"a list of {getattr(item, '__name__', 'values')}"
    # For dict[Any, Any] and list[Any], the type without its brackets is described.
    plain_type = value_type if origin is None else origin
    return _DESCRIPTIONS.get(plain_type, "any value")
