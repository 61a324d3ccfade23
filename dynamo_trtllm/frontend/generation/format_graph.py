"""Find the groups of nodes of a directed graph that refer to each other, without recursion and in linear time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

Graph: TypeAlias = Mapping[Any, Sequence[Any]]
"""The nodes that each node refers to. All of them are keys."""


def components(graph: Graph) -> Iterator[list[Any]]:
    """Yield the strongly connected components of a graph, each after those that it refers to (Tarjan's algorithm)."""
    number: dict[Any, int] = {}  # of each node that was reached, in this order
    lowest: dict[Any, int] = {}  # by node: the smallest number of the pending nodes that it reaches
    pending: list[Any] = []  # nodes whose component is not complete
    is_pending: set[Any] = set()
    for root in graph:
        if root in number:
            continue
        path: list[tuple[Any, Iterator[Any]]] = []
        following: Any = root
        while True:
            if following is not None:
                number[following] = lowest[following] = len(number)
                pending.append(following)
                is_pending.add(following)
                path.append((following, iter(graph[following])))
            node, others = path[-1]
            following = None
            for other in others:
                if other not in number:
                    following = other
                    break
                if other in is_pending:
                    lowest[node] = min(lowest[node], number[other])
            if following is not None:
                continue
            path.pop()
            if lowest[node] == number[node]:
                component = _taken(pending, node)
                is_pending.difference_update(component)
                yield component
            if not path:
                break
            parent = path[-1][0]
            lowest[parent] = min(lowest[parent], lowest[node])


def _taken(pending: list[Any], first: Any) -> list[Any]:
    """Remove a component from the end of the pending nodes and return it."""
    component = []
    while True:
        node = pending.pop()
        component.append(node)
        if node == first:
            return component


def longest_path(graph: Graph) -> int:
    """Return an upper bound of the number of nodes on a path that visits no node twice.

    It is exact for a graph without cycles. All nodes of a component may be on the path.
    """
    lengths: dict[Any, int] = {}
    for component in components(graph):
        inner = set(component)
        below = 0
        for node in component:
            for other in graph[node]:
                if other not in inner:
                    below = max(below, lengths[other])
        lengths |= dict.fromkeys(component, below + len(component))
    return max(lengths.values(), default=0)
