"""Preflight's verdicts on configurations of shapes that were seen in public: all findings, and no
other.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_trtllm.cli import preflight
from dynamo_trtllm.protocol.errors import ConfigError
from tests.kit.cases import each_case
from tests.unit.engines.trtllm.preflight_corpus import (
    CORPUS,
    MODELS,
    check,
    found,
    in_order,
    passed,
    read_case,
)

pytestmark = pytest.mark.usefixtures("without_gpus")

PATHS = sorted(CORPUS.glob("*.yaml"))


@pytest.fixture
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case without a GPU means an unknown one, also on a machine that has some."""
    monkeypatch.setattr(preflight, "visible_gpus", list)


@each_case("path", PATHS)
def test_corpus_case_has_exactly_its_problems(path: Path, tmp_path: Path) -> None:
    case = read_case(path)
    if case.refused:
        with pytest.raises(ConfigError) as refusal:
            check(case, tmp_path)
        assert [part for part in case.refused if part not in refusal.value.message] == [], (
            refusal.value.message
        )
        return
    assert case.findings is not None, "a case needs findings, or refused"
    report = check(case, tmp_path)
    assert found(report, case.findings) == in_order(case.findings), case.right
    for role, arguments in case.arguments.items():
        given = passed(report, role)
        assert {key: given.get(key) for key in arguments} == arguments, case.right


def test_corpus_uses_every_listed_model() -> None:
    used = {read_case(path).model for path in PATHS}
    assert set(MODELS) - used == set()
