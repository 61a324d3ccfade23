"""The KV transfer benchmark of GPU machines, in small and without a GPU: its text runs, and it checks
what arrived.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import kv_transfer, result
from dynamo_trtllm.engines.torch.transfer_buffer import TransferBuffer

pytestmark = pytest.mark.timeout(120)  # two processes import torch

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and small sizes, so that the run takes seconds."""
    for name, value in {
        "SIZES": [64 * KIB],
        "TOKENS": [40, 64],
        "PIECES": [MIB],
        "STAGING_BYTES": 24 * MIB,
        "TOKENS_OF_PIECES": 64,
        "REPEATS": 2,
    }.items():
        monkeypatch.setitem(getattr(kv_transfer, name), "cpu", value)


# Each starts a process that imports torch. Nothing but a session on GPUs uses the benchmark.
@pytest.mark.long
def test_bench_on_cpu_has_every_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results" / "kv_transfer.json"
    monkeypatch.setattr("sys.argv", ["kv_transfer", "--device", "cpu", "--out", str(path)])
    kv_transfer.main()
    found = result.read(path)
    assert found.step == "kv_transfer"
    for kind, names in {"contiguous": {"65536"}, "kv": {"40", "64"}, "pieces": {str(MIB)}}.items():
        assert set(found.detail[kind]) == names
        assert all(row["alone_s"] > 0 for row in found.detail[kind].values())
    assert found.detail["kv"]["64"]["at_once"] > 1
    printed = capsys.readouterr().out
    assert "64 tokens" in printed
    assert "gathered whole" in printed


@pytest.mark.long
def test_bench_when_copies_go_wrong_then_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    scatter = TransferBuffer.scatter
    monkeypatch.setattr(
        TransferBuffer,
        "scatter",
        lambda self, allocation, rows, index: scatter(self, allocation, rows.flip(0), index),
    )
    with pytest.raises(AssertionError, match="received bytes differ"):
        kv_transfer.run("cpu")


def test_bars_when_measured_on_gpus_then_each_is_judged() -> None:
    peer = {size: {"queued_s": 0.001, "alone_s": 0.002} for size in (64 * MIB, 1024 * MIB, 7, 8)}
    found = {
        "peer copy": peer,
        "contiguous": {
            64 * MIB: {"queued_s": 0.00101, "alone_s": 0.004},
            1024 * MIB: {"queued_s": 0.0011, "alone_s": 1},
        },
        "kv": {
            8192: {"bytes": 7, "queued_s": 0.0012, "alone_s": 0.0014},
            32768: {"bytes": 8, "queued_s": 0.0013, "alone_s": 0.01},
        },
    }
    assert [row.met for row in kv_transfer.bars(found)] == [True, False, True, False, True]
