"""The environment is written only where the user has said nothing."""

from __future__ import annotations

import logging
import os

import pytest

from dynamo_trtllm.config import environ

NAME = "DYNAMO_TRTLLM_TEST_EXPORT"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "")  # so that monkeypatch restores it afterwards
    monkeypatch.delenv(NAME)


def test_export_when_unset_then_it_sets_the_variable() -> None:
    assert environ.export(NAME, "1", wanted_by="a library") == "1"
    assert os.environ[NAME] == "1"


def test_export_keeps_the_users_value_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(NAME, "mine")
    with caplog.at_level(logging.WARNING):
        assert environ.export(NAME, "1", wanted_by="a library") == "mine"
    assert os.environ[NAME] == "mine"
    assert "a library" in caplog.text
    assert NAME in caplog.text


def test_export_when_value_is_the_same_then_is_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(NAME, "1")
    assert environ.export(NAME, "1", wanted_by="a library") == "1"
    assert not caplog.records
