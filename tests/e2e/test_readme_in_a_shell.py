"""The commands of README, typed in their order into a shell that has not activated the environment,
and without the packages of extras.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.printed_pages import blocks, make_clone, typed
from tests.kit.bare_wheel import hide_extras

# What takes minutes, gigabytes or GPUs is asked for its help instead.
_SHORT = (
    (r"^(\./scripts/\w+)\b.*", r"\1 --help"),
    (r"^(dynamo-trtllm \w+)\b.*", r"\1 --help"),
    (r"^python3 -m venv .*|^pip install .*", ""),
)


@pytest.mark.timeout(120)
def test_readme_can_be_typed_as_it_is_printed(tmp_path: Path) -> None:
    script = "\n".join(blocks("README.md"))
    for pattern, replacement in _SHORT:
        script = re.sub(pattern, replacement, script, flags=re.MULTILINE)
    assert script.index("./scripts/demo --help") < script.index("source .venv/bin/activate")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    hide_extras(hidden)
    said = typed(script, make_clone(tmp_path), PYTHONPATH=str(hidden))
    for usage in (
        "scripts/demo",
        "scripts/test",
        "dynamo-trtllm chat",
        "dynamo-trtllm serve MODEL",
    ):
        assert f"usage: {usage}" in said
