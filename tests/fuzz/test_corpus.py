"""The inputs that reached different code, and those of former bugs, keep the targets' properties."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.fuzz import corpus_file
from tests.fuzz.registry import MODULES, load
from tests.kit.cases import each_case


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Log no rejected inputs: they are thousands."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@each_case("name", MODULES)
def test_corpus_keeps_the_properties_of_its_target(name: str) -> None:
    target = load(name)
    for data in [*target.seeds(), *corpus_file.read(name)]:
        try:
            target.check(data)
        except Exception as exc:
            exc.add_note(f"the input was {data!r}")
            raise


def test_every_corpus_has_a_target() -> None:
    stored = {path.stem for path in corpus_file.FOLDER.glob("*.jsonl")}
    assert stored <= set(MODULES)
