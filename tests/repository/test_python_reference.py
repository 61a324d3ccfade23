"""The Python reference is what the docstrings say, and has every public name."""

from __future__ import annotations

import ast
import re

import pytest

import dynamo_trtllm
from scripts import python_reference


def test_page_when_written_again_then_as_committed() -> None:
    written = python_reference.page()
    assert written == python_reference.PAGE.read_text(encoding="utf-8"), "run scripts/docs"
    names = re.findall(r"^## (\w+)$", written, re.MULTILINE)
    assert sorted(names) == sorted(dynamo_trtllm.__all__)


@pytest.mark.parametrize(
    ("source", "default"),
    [
        ("0", "`0`"),
        ("msgspec.field(default=None, name='x')", "`None`"),
        ("field(default_factory=dict)", "`{}`"),
        ("field(default_factory=Limits)", "`Limits()`"),
        ("msgspec.field(name='x')", "required"),
    ],
)
def test_default_of_a_field_is_its_value_if_none_is_passed(source: str, default: str) -> None:
    assert python_reference._default(ast.parse(source, mode="eval").body) == default


def test_sections_of_a_docstring_become_lists() -> None:
    docstring = """Do it.

        Args:
            name: the name,
                on two lines.

        Then it is done.
        """
    assert python_reference.markdown(docstring) == (
        "Do it.\n\nArgs:\n\n* `name`: the name,\n  on two lines.\n\nThen it is done.\n"
    )
