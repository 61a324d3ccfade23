"""`dynamo-trtllm shares`: what it shows, and what it sets with one write."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import pytest

from dynamo_trtllm.cli import shares as command
from dynamo_trtllm.cluster.discovery.memory import RECORDS, MemoryDiscovery
from dynamo_trtllm.cluster.discovery.share_records import share_key
from dynamo_trtllm.config.commands import SharesConfig
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.config.shares import parse_shares
from dynamo_trtllm.protocol.errors import ConfigError, VersionMismatch
from dynamo_trtllm.protocol.messages import WIRE_VERSION, Role, encode
from dynamo_trtllm.protocol.shares import Shares, ShareTable
from tests.kit.cases import each_case
from tests.kit.instances import elastic_instance, make_instance


class Namespace:
    """A namespace in memory, and the command for it."""

    def __init__(self) -> None:
        self.etcd = f"memory://{secrets.token_hex(4)}"
        self.records = RECORDS.at(self.etcd)
        self.discovery = MemoryDiscovery(self.records)

    async def run(self, *flags: str) -> int:
        config = load(SharesConfig, prog="shares", argv=flags, environ={})
        config = config.model_copy(update={"etcd_endpoints": self.etcd})
        return await command._run(config)


@pytest.fixture
async def namespace() -> AsyncIterator[Namespace]:
    made = Namespace()
    async with aclosing(made.discovery):
        await made.discovery.register(make_instance(9, role=Role.DECODE))
        await made.discovery.register(elastic_instance(0xA1))
        await made.discovery.register(elastic_instance(0xB2, Shares(0.5, 1.0)))
        yield made


def lines(text: str) -> Sequence[Sequence[str]]:
    return [line.split() for line in text.splitlines()]


async def test_shares_shows_those_with_which_workers_registered(
    namespace: Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await namespace.run() == 0
    _, *rows = lines(capsys.readouterr().out)
    assert rows == [
        ["a1", "tiny", "1", "1", "the", "worker"],
        ["b2", "tiny", "0.5", "1", "the", "worker"],
    ]


async def test_shares_sets_several_workers_with_one_write(
    namespace: Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await namespace.run("--set", "all=1/1", "--set", "a1=0.25/0", "--reason", "long") == 0
    table = (await namespace.discovery.read_shares("dynamo")).table
    assert table is not None
    assert table.workers == {0xA1: Shares(0.25, 0.0), 0xB2: Shares(1.0, 1.0)}
    assert table.revision == 1
    out = capsys.readouterr().out
    assert "revision 1 of epoch 0" in out
    assert "long" in out
    assert await namespace.run("--set", "b2=0/1", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["revision"] == 2
    assert [worker["prefill_share"] for worker in printed["workers"]] == [0.25, 0.0]


async def test_history_has_each_change_and_why(
    namespace: Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await namespace.run("--history") == 0
    assert capsys.readouterr().out == "no change of shares is known\n"
    await namespace.run("--set", "a1=1/0", "--set", "b2=0/1", "--reason", "long prompts")
    await namespace.run("--set", "b2=1/1", "--reason", "fewer")
    capsys.readouterr()
    assert await namespace.run("--history") == 0
    first, second = capsys.readouterr().out.split("\n\n")
    head, *rows = first.splitlines()
    assert head.startswith("revision 1 of epoch 0, ")
    assert f"by shares on {socket.gethostname()}" in head
    assert rows == ["  long prompts", "  worker a1: 1/1 -> 1/0", "  worker b2: 0.5/1 -> 0/1"]
    assert "worker b2: 0/1 -> 1/1" in second
    assert await namespace.run("--json") == 0
    history = json.loads(capsys.readouterr().out)["history"]
    assert [change["reason"] for change in history] == ["long prompts", "fewer"]
    assert history[1]["workers"] == [{"id": "b2", "before": "0/1", "after": "1/1"}]


async def test_shares_replaces_a_table_that_is_invalid(
    namespace: Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace.records.put(share_key("dynamo"), b"nothing")
    assert await namespace.run() == 0
    printed = capsys.readouterr()
    assert "is invalid, and frontends use the shares before it" in printed.err
    assert printed.err.endswith("; set shares to replace it\n")
    assert "the worker, or a table before" in printed.out
    assert await namespace.run("--set", "a1=0/1") == 0
    assert "is invalid" not in capsys.readouterr().err


async def test_shares_of_another_release_are_not_replaced(
    namespace: Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both the list and the attempt to set shares name the same remedy."""
    record = encode(ShareTable(wire=WIRE_VERSION + 2))
    namespace.records.put(share_key("dynamo"), record)
    remedy = "if no process of that version runs any more, delete the record in etcd"
    assert await namespace.run() == 0
    assert remedy in capsys.readouterr().err
    with pytest.raises(VersionMismatch, match=remedy):
        await namespace.run("--set", "a1=0/1")


async def test_shares_of_no_elastic_worker_is_an_error(
    namespace: Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await namespace.run("--set", "c3=1/0") == 1
    assert "c3 is no elastic worker of namespace dynamo; these are: a1, b2" in (
        capsys.readouterr().err
    )
    assert await namespace.run("--namespace", "other") == 1
    assert "--disaggregation-mode elastic" in capsys.readouterr().err


@each_case(
    ("setting", "reason"),
    [
        ("a1", "must be WORKER=PREFILL/DECODE"),
        ("a1=1", "must be WORKER=PREFILL/DECODE"),
        ("worker=1/1", "must be WORKER=PREFILL/DECODE"),
        ("a1=nan/1", "must be WORKER=PREFILL/DECODE"),
        ("a1=-1/1", "share -1 must be a number from 0 to 1"),
        ("a1=1/1.5", "share 1.5 must be a number from 0 to 1"),
        ("a1=1/1.5.2", "share 1.5.2 must be a number from 0 to 1"),
        ("a1=1e999/1", "share 1e999 must be a number from 0 to 1"),
        ("a1=0/0", "both shares are 0"),
    ],
)
def test_bad_setting_of_shares_says_why(setting: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(SharesConfig, prog="shares", argv=["--set", setting], environ={})
    assert reason in caught.value.message


@each_case(
    ("flags", "reason"),
    [
        (["--prefill-share", "0", "--decode-share", "0"], "both shares are 0"),
        (["--prefill-share", "nan"], "prefill-share"),
        (["--prefill-share", "1.1"], "prefill-share"),
        (["--decode-share", "-0.1"], "decode-share"),
        (["--decode-share", "half"], "decode-share"),
        (["--max-transfer-kv-fraction", "1"], "max-transfer-kv-fraction"),
        (["--disaggregation-mode", "decode", "--decode-share", "0.5"], "the role decode fixes"),
        (
            ["--disaggregation-mode", "decode", "--max-transfer-kv-fraction", "0.4"],
            "only with --disaggregation-mode elastic, not decode",
        ),
    ],
)
def test_bad_shares_of_a_worker_are_errors(flags: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(
            WorkerConfig,
            prog="worker",
            argv=["--model", "m", "--disaggregation-mode", "elastic", *flags],
            environ={},
        )
    assert reason in caught.value.message


def test_negative_zero_is_zero() -> None:
    assert str(parse_shares("all=-0/1").shares.prefill) == "0.0"


def test_reason_without_a_change_is_rejected() -> None:
    with pytest.raises(ConfigError, match="--reason needs --set"):
        load(SharesConfig, prog="shares", argv=["--reason", "x"], environ={})


@pytest.mark.parametrize("name", ["--set", "--set-shares"])
def test_error_of_a_repeated_flag_has_the_name_that_was_typed(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(SharesConfig, prog="shares", argv=["--set", "a=1/1", name, "b=2/0"], environ={})
    assert caught.value.message.startswith(f"flag {name} is 'b=2/0'")
