"""What `dynamo-trtllm status` prints, without processes."""

from __future__ import annotations

from typing import ClassVar

import pytest

from dynamo_trtllm.cli import status
from dynamo_trtllm.cli.status_keys import KeyStatus
from dynamo_trtllm.cli.status_view import DeploymentReport, ProcessStatus, as_text
from dynamo_trtllm.cluster.discovery import etcd_store
from dynamo_trtllm.cluster.discovery.share_records import planner_key, share_key
from dynamo_trtllm.config.client_commands import StatusConfig


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


def test_status_of_a_planner_says_whether_it_leads() -> None:
    planners = [
        ProcessStatus(name="a", role="planner", state="ready", load={"planner_is_leader": 1.0}),
        ProcessStatus(name="b", role="planner", state="ready", load={"planner_is_leader": 0.0}),
    ]
    text = as_text([DeploymentReport(namespace="n", processes=planners)])
    assert [line.split()[4:] for line in text.splitlines()[2:]] == [
        ["leads"],
        "does not lead".split(),
    ]


class ReadStore:
    """A store of etcd that has some records."""

    records: ClassVar[dict[str, bytes]] = {}

    def __init__(self, _: object) -> None: ...

    async def read_all(self, prefix: str) -> etcd_store.Snapshot:
        found = {key: value for key, value in self.records.items() if key.startswith(prefix)}
        return etcd_store.Snapshot(records=found, revision=1)

    async def aclose(self) -> None: ...


async def test_namespace_with_only_shares_has_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "EtcdStore", ReadStore)
    monkeypatch.setattr(ReadStore, "records", {share_key("old"): b"", planner_key("old"): b""})
    for namespace in ("old", "other"):
        report, others = await status._of_etcd(StatusConfig(namespace=namespace))
        assert (report.processes, report.not_ready, others) == ([], [], set())


def test_long_reason_is_a_line_below_the_table() -> None:
    reason = "http://127.0.0.1:8000/metrics rejects a client without an API key; set one"
    frontend = ProcessStatus(name="frontend", role="frontend", state="ready", reason=reason)
    worker = ProcessStatus(name="decode", role="decode", state="loading", reason="weights 43%")
    lines = as_text([DeploymentReport(namespace="n", processes=[frontend, worker])]).splitlines()
    assert lines[2].split() == ["frontend", "frontend", "ready", "-", "-"]
    assert "loading: weights 43%" in lines[3]
    assert lines[4:] == [f"frontend: {reason}"]
