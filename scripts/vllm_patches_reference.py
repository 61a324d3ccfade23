"""Write the table of patches in docs/vllm-internals.md.

`python -m scripts.vllm_patches_reference` runs it. A test compares the page with this output.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from pathlib import Path

from dynamo_trtllm.engines.vllm import patches
from dynamo_trtllm.engines.vllm.patches.patch import Patch
from scripts.config_reference import table

PAGE = Path(__file__).parents[1] / "docs" / "vllm-internals.md"
HEADING = "Patches"


def every_patch() -> list[Patch]:
    """Return the patches, by the name of their module.

    Modules that bind names of vLLM need it, or its stand-in.
    """
    names = [module.name for module in pkgutil.iter_modules(patches.__path__)]
    names.remove("patch")  # it defines what a patch is
    return sorted(importlib.import_module(f"{patches.__name__}.{name}").PATCH for name in names)


def page() -> str:
    """Return the page with one row for each patch.

    Raises:
        ValueError: the page has no table under the heading.
    """
    text = PAGE.read_text(encoding="utf-8")
    rows = []
    for patch in every_patch():
        upstream = patch.upstream
        # The address of an issue or pull request. Otherwise, it is a sentence.
        is_address = " " not in upstream
        if is_address:
            _, _, number = upstream.rpartition("/")
            upstream = f"[{number}]({upstream})"
        rows.append(
            (
                f"`{patch.name}`",
                patch.fault,
                upstream,
                patch.needed_in,
                patch.detection,
                patch.otherwise,
                patch.goes,
            )
        )
    head = (
        "`patches/`",
        "fault of vLLM",
        "upstream",
        "needed in",
        "how that is found",
        "if it does not fit",
        "goes",
    )
    found = re.search(rf"^#+ {HEADING}\n(?:(?![#|]).*\n)*((?:\|.*\n)+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"{PAGE.name} has no table under a heading {HEADING!r}")
    return text[: found.start(1)] + table(head, rows) + text[found.end(1) :]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.kit.fake_packages import fake_vllm

    with fake_vllm():
        PAGE.write_text(page(), encoding="utf-8")
