"""What `dynamo-trtllm status` prints, without processes."""

from __future__ import annotations

from dynamo_trtllm.cli.status_keys import KeyStatus
from dynamo_trtllm.cli.status_view import DeploymentReport, ProcessStatus, as_text


def key(name: str, weight: float, tokens: int, waiting: int = 0) -> KeyStatus:
    return KeyStatus(
        name=name, weight=weight, tokens_last_minute=tokens, waiting=waiting, running=1
    )


def test_status_shows_tokens_of_keys_beside_their_shares() -> None:
    frontend = ProcessStatus(
        name="frontend",
        role="frontend",
        state="ready",
        keys=[key("team-b", 3, 6000, waiting=7), key("team-a", 1, 2000)],
    )
    report = DeploymentReport(namespace="n", processes=[frontend])
    lines = [line.split() for line in as_text([report]).splitlines()]
    assert ["team-b", "3", "6,000", "75%", "75%", "7", "1"] in lines
    assert ["team-a", "1", "2,000", "25%", "25%", "0", "1"] in lines


def test_status_without_keys_has_no_table_of_them() -> None:
    frontend = ProcessStatus(name="frontend", role="frontend", state="ready")
    assert "API key" not in as_text([DeploymentReport(namespace="n", processes=[frontend])])


def test_status_shows_the_shares_of_an_elastic_worker() -> None:
    registered = ProcessStatus(
        name="a", role="elastic", state="ready", prefill_share=1.0, decode_share=1.0
    )
    changed = ProcessStatus(
        name="b",
        role="elastic",
        state="ready",
        prefill_share=0.25,
        decode_share=0.0,
        shares_since="2026-11-30T02:03:04.567+00:00",
    )
    report = DeploymentReport(namespace="n", processes=[registered, changed])
    text = as_text([report])
    assert "elastic 1/1  " in text
    assert "elastic 0.25/0 since 02:03:04" in text


def test_long_reason_is_a_line_below_the_table() -> None:
    reason = "http://127.0.0.1:8000/metrics rejects a client without an API key; set one"
    frontend = ProcessStatus(name="frontend", role="frontend", state="ready", reason=reason)
    worker = ProcessStatus(name="decode", role="decode", state="loading", reason="weights 43%")
    lines = as_text([DeploymentReport(namespace="n", processes=[frontend, worker])]).splitlines()
    assert lines[2].split() == ["frontend", "frontend", "ready", "-", "-"]
    assert "loading: weights 43%" in lines[3]
    assert lines[4:] == [f"frontend: {reason}"]
