"""A secret that an error shows is a finding. The same text in another place of the input is none."""

from __future__ import annotations

import pytest

from dynamo_trtllm.access import keys_file
from dynamo_trtllm.config import load as config_load
from tests.fuzz.registry import load
from tests.fuzz.target import Target
from tests.fuzz.targets import http


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("command-line", b"--port456789abcdef"),
        ("command-line", b"--sk-0123456789abcdef"),
        ("command-line", b"p4ssw0rd-of-etcd"),
        ("api-keys", b"sk- is not a JSON object\n"),
        ("frontend", http._get("/sk-of-another-server-abc")),
    ],
)
def test_text_like_a_secret_in_another_place_is_none(name: str, data: bytes) -> None:
    load(name).check(data)


def test_shown_password_or_key_of_a_setting_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_load, "_shown", lambda _flag, value: str(value))
    check_is_found("command-line")


def test_shown_key_in_a_file_of_keys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_file, "_problem", str)
    check_is_found("api-keys")


def check_is_found(name: str) -> None:
    """Check that one of the first inputs of a target shows the leak."""
    with pytest.raises(AssertionError, match="has a part of a secret"):
        run_seeds(load(name))


def run_seeds(target: Target) -> None:
    for data in target.seeds():
        target.check(data)
