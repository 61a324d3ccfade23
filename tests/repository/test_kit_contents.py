"""The docstring of tests/kit says what is in which of its modules."""

from __future__ import annotations

import re
from pathlib import Path

import tests.kit


def test_docstring_when_read_then_it_names_every_module_once() -> None:
    contents = re.findall(r"^    ([a-z_, ]+):", tests.kit.__doc__ or "", re.MULTILINE)
    named = [name for names in contents for name in names.split(", ")]
    folder = Path(__file__).parents[1] / "kit"
    assert sorted(named) == sorted(path.stem for path in folder.glob("[a-z]*.py"))
