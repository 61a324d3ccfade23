"""Check that the class of an engine has the methods of the interface, before it is used."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from dynamo_trtllm.engines.capabilities import CAPABILITIES
from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.protocol.errors import ConfigError


def check_engine_class(engine_class: type) -> None:
    """Check the five methods of an engine, and those of the capabilities that it inherits from.

    Raises:
        ConfigError: names the class, the method, and what is wrong with it.
    """
    interfaces: list[type] = [Engine]
    interfaces += [
        capability for capability in CAPABILITIES if issubclass(engine_class, capability)
    ]
    for interface in interfaces:
        for name, declared in vars(interface).items():
            if getattr(declared, "__isabstractmethod__", False):
                _check(engine_class, name, declared, interface)


def _check(engine_class: type, name: str, declared: object, interface: type) -> None:
    problem = _problem(getattr(engine_class, name, None), name, declared)
    if problem:
        raise ConfigError(
            f"the engine class {engine_class.__module__}.{engine_class.__qualname__} {problem}; see"
            f" {interface.__name__}.{name}",
            field="engine",
        )


def _problem(found: object, name: str, declared: object) -> str:
    """Return what is wrong with an attribute of the class; "" if nothing is.

    Args:
        found: the attribute of the class; None if the class has no such attribute.
        name: the name of the attribute.
        declared: the attribute of the interface.
    """
    if found is None or getattr(found, "__isabstractmethod__", False):
        return f"has no {name}"
    if isinstance(declared, property):
        return f"has {name} as a method, not as a property" if inspect.isfunction(found) else ""
    if not callable(found):
        return f"has {name}, which is no method"
    assert callable(declared)
    must_be_async = inspect.iscoroutinefunction(declared)
    if must_be_async and not inspect.iscoroutinefunction(found):
        return f"has {name} as a plain method, not as `async def {name}`"
    is_async = inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found)
    if is_async and not must_be_async:
        return f"has `async def {name}`, not a plain method"
    if inspect.isgeneratorfunction(found):
        return f"has {name} as a generator, with `yield`, not as a plain method"
    return _problem_of_parameters(found, name, declared)


def _problem_of_parameters(
    found: Callable[..., object], name: str, declared: Callable[..., object]
) -> str:
    """Return why a method can't be called as the interface says; "" if it can."""
    # Parameters are passed by position. The first is `self`.
    names = list(inspect.signature(declared).parameters)
    try:
        inspect.signature(found).bind(*names)
    except TypeError as exc:
        return f"has {name}, which can't be called as {name}({', '.join(names[1:])}): {exc}"
    return ""
