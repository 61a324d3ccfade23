"""Find the groups of nodes of a directed graph that refer to each other.

All functions take linear time and no recursion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

Graph: TypeAlias = Mapping[Any, Sequence[Any]]
"""The nodes that each node refers to. All nodes are keys."""


def components(graph: Graph) -> Iterator[list[Any]]:
    """Yield the strongly connected components of a graph (Tarjan's algorithm).

    A component comes after the components that it refers to.
    """
    number: dict[Any, int] = {}  # the nodes that were reached, numbered in this order
    # For each node, the smallest number of the pending nodes that it reaches.
    lowest: dict[Any, int] = {}
    pending: list[Any] = []  # nodes whose component is not complete
    pending_set: set[Any] = set()
    for root in graph:
        if root in number:
            continue
        path: list[tuple[Any, Iterator[Any]]] = []
        unvisited: Any = root
        while True:
            if unvisited is not None:
                lowest[unvisited] = len(number)
                number[unvisited] = len(number)
                pending.append(unvisited)
                pending_set.add(unvisited)
                path.append((unvisited, iter(graph[unvisited])))
            node, others = path[-1]
            unvisited = None
            for other in others:
                if other not in number:
                    unvisited = other
                    break
                if other in pending_set:
                    lowest[node] = min(lowest[node], number[other])
            if unvisited is not None:
                continue
            path.pop()
            if lowest[node] == number[node]:
                component = _pop_component(pending, node)
                pending_set.difference_update(component)
                yield component
            if not path:
                break
            parent = path[-1][0]
            lowest[parent] = min(lowest[parent], lowest[node])


def _pop_component(pending: list[Any], first: Any) -> list[Any]:
    """Remove a component from the end of the pending nodes and return it."""
    component = []
    while True:
        node = pending.pop()
        component.append(node)
        if node == first:
            return component


def longest_path(children: Graph, references: Mapping[Any, Any]) -> int:
    """Return an upper bound of the number of nodes on a path that visits no node twice.

    Without cycles, the bound is exact. In a component, a path descends from child to child. A
    reference ends this descent, and begins the next one at its target. No two descents of a path
    begin at the same node. So a path has at most as many nodes as the longest descents from all
    targets have together.

    Args:
        children: the children of each node. They form trees, and a node comes before its children.
        references: the node that a node refers to, for each node that has a reference.
    """
    graph = {node: [*below, *_referred(references, node)] for node, below in children.items()}
    component_of: dict[Any, int] = {}
    ordered = list(components(graph))
    for number, component in enumerate(ordered):
        component_of |= dict.fromkeys(component, number)
    # For each node, the most nodes on a descent within its component.
    descents: dict[Any, int] = {}
    for node in reversed(list(children)):
        own = component_of[node]
        inner = [descents[child] for child in children[node] if component_of[child] == own]
        descents[node] = 1 + max(inner, default=0)
    targets = set(references.values())
    lengths: list[int] = []  # the length of the longest path from each component
    for number, component in enumerate(ordered):
        others: set[int] = set()
        for node in component:
            others.update(component_of[other] for other in graph[node])
        others.discard(number)
        longest_after = max((lengths[other] for other in others), default=0)
        inside = sum(descents[node] for node in component if node in targets)
        # Without a cycle, a component is one node.
        lengths.append(longest_after + max(1, inside))
    return max(lengths, default=0)


def _referred(references: Mapping[Any, Any], node: Any) -> list[Any]:
    return [references[node]] if node in references else []
