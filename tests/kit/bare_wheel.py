"""Hides the packages of extras from processes, as where only the wheel is installed.

An environment with the bare wheel would need downloads. So the tests' environment is used, with a
blocker of imports: only the packages that the wheel requires can be imported, and what those
require.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

# An import of these fails then, as if they were not installed.
_BLOCK = """
import sys
for name in {names}:
    sys.modules[name] = None
"""


def required(name: str) -> Iterator[str]:
    """Yield the distributions that one requires without extras, and what those require."""
    found = {name}
    waiting = [name]
    while waiting:
        for line in metadata.requires(waiting.pop()) or ():
            requirement = re.match(r"[\w.-]+", line)
            if requirement is None or "extra ==" in line:
                continue
            other = requirement[0].lower().replace("_", "-")
            if other not in found:
                found.add(other)
                try:
                    metadata.distribution(other)
                except metadata.PackageNotFoundError:
                    continue  # for another platform
                waiting.append(other)
                yield other


def of_extras() -> list[str]:
    """Return the modules that are installed and that the bare wheel does not bring."""
    kept = {"dynamo-trtllm", *required("dynamo-trtllm")}
    modules = []
    for module, owners in metadata.packages_distributions().items():
        names = {owner.lower().replace("_", "-") for owner in owners}
        if names.isdisjoint(kept) and not module.startswith("_"):
            modules.append(module)
    return sorted(modules)


def hide_extras(folder: Path) -> None:
    """Write a file into a folder that hides the extras from processes with it in PYTHONPATH."""
    (folder / "sitecustomize.py").write_text(_BLOCK.format(names=of_extras()))
