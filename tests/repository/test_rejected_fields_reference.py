"""The table of docs/reference-rejected-fields.md has every rejected field as it is in the code, and no
other.
"""

from __future__ import annotations

from scripts import rejected_fields_reference


def test_page_when_written_again_then_as_committed() -> None:
    written = rejected_fields_reference.page()
    assert "| `bad_words` | all |" in written
    assert written == rejected_fields_reference.PAGE.read_text(encoding="utf-8"), "run scripts/docs"
