"""Share objects by address among the members of a cluster within one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class SharedByAddress(Generic[T]):
    """One object for each address, which lives as long as a member uses it. Thread-safe.

    Args:
        create: returns a new object.
    """

    def __init__(self, create: Callable[[], T]) -> None:
        self._create = create
        self._by_address: WeakValueDictionary[str, T] = WeakValueDictionary()
        self._finding = threading.Lock()

    def at(self, address: str) -> T:
        """Return the object of an address, a new one if no member uses it yet."""
        with self._finding:
            shared = self._by_address.get(address)
            if shared is None:
                shared = self._create()
                self._by_address[address] = shared
            return shared
