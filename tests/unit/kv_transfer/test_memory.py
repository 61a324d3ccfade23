from __future__ import annotations

import pytest

from dynamo_trtllm.kv_transfer.memory import (
    MemoryRegion,
    address_of,
    require_cpu,
    require_sizes,
    view,
)
from dynamo_trtllm.protocol.errors import TransferFailed


def test_view_when_written_then_the_memory_itself_changes() -> None:
    buffer = bytearray(b"abcdef")
    seen = view(MemoryRegion(address_of(buffer) + 2, 3))
    assert bytes(seen) == b"cde"
    seen[:] = b"XYZ"
    assert buffer == b"abXYZf"


def test_view_when_piece_has_no_bytes_then_is_empty() -> None:
    assert len(view(MemoryRegion(0, 0))) == 0


def test_require_cpu_when_on_a_gpu_then_names_the_device() -> None:
    require_cpu([MemoryRegion(1, 1)], "tcp")
    with pytest.raises(TransferFailed, match=r"cuda:1.*transfer backend nixl"):
        require_cpu([MemoryRegion(1, 1), MemoryRegion(2, 1, "cuda:1")], "tcp")


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ([1], "1 regions at prefill, 2 at decode"),
        ([1, 3], "region 1 has 3 bytes"),
        ([2, 1], "region 0 has 2 bytes"),
    ],
)
def test_require_sizes_when_different_then_says_where(theirs: list[int], message: str) -> None:
    regions = [MemoryRegion(1, 1), MemoryRegion(2, 2)]
    require_sizes("t", [1, 2], regions)
    with pytest.raises(TransferFailed, match=message):
        require_sizes("t", theirs, regions)
