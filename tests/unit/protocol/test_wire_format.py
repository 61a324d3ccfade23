"""The names on the wire stay when a Python name changes: other releases read these messages and
records.
"""

from __future__ import annotations

import enum
import json
from pathlib import Path

import msgspec

from dynamo_trtllm.cluster.request_plane import frames
from dynamo_trtllm.engines.trtllm import transfer_params as trtllm_transfers
from dynamo_trtllm.engines.vllm import transfer_params as vllm_transfers
from dynamo_trtllm.kv_transfer import tcp
from dynamo_trtllm.kv_transfer.nixl import bindings as nixl_bindings
from dynamo_trtllm.observability import recording_server
from dynamo_trtllm.protocol import cost_model, kv_events, messages, shares

TRANSFERS = (tcp, nixl_bindings, trtllm_transfers, vllm_transfers)
MODULES = (messages, shares, cost_model, kv_events, recording_server, frames, *TRANSFERS)
RECORDED = Path(__file__).parents[2] / "data" / "wire_format.json"


def test_wire_format_is_as_recorded() -> None:
    """A new optional field or message is added to the file by hand; another difference needs a new
    wire version.
    """
    assert wire_format() == json.loads(RECORDED.read_text(encoding="utf-8"))


def wire_format() -> dict[str, object]:
    """Return what each message of MODULES looks like on the wire, by its Python name."""
    found: dict[str, object] = {}
    for module in MODULES:
        for name, value in vars(module).items():
            if not isinstance(value, type) or value.__module__ != module.__name__:
                continue
            if issubclass(value, msgspec.Struct):
                found[name] = struct_format(value)
            elif issubclass(value, enum.Enum) and issubclass(value, str):
                found[name] = sorted(member.value for member in value)
    return found


def struct_format(struct: type[msgspec.Struct]) -> dict[str, object]:
    config = struct.__struct_config__
    fields = [
        field.encode_name + ("" if field.required else "?")
        for field in msgspec.structs.fields(struct)
    ]
    return {"tag": config.tag, "fields": len(fields) if config.array_like else sorted(fields)}
