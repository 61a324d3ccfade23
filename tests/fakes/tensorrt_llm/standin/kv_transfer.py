"""The torch engine's transfer inside the vendor's opaque bytes, and what decode must be given
back.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo_trtllm.protocol.errors import BadFrame
from dynamo_trtllm.protocol.messages import KvTransferParams, decode, encode, token_ids
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.standin import traps
from tensorrt_llm.standin.release import LINE, VERSION

_DRAFTS = [7, 8, 9]
GREETING = b"\xff" + (1).to_bytes(8, "big") + b"\x7f"  # of ZeroMQ, at once for each connection


class PythonTransceiver:
    """A transceiver whose KV is found by an address that is not in the answer.

    Asks its peers on the executor's loop, without limit.
    """

    def __init__(self) -> None:
        self.states: dict[int, bytes] = {}  # by request id
        self._is_closed = threading.Event()
        self._server = socketserver.ThreadingTCPServer(
            ("127.0.0.1", 0), self._handler(), bind_and_activate=True
        )
        self._server.daemon_threads = True
        self.endpoint = f"tcp://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(
            target=self._server.serve_forever, args=(0.01,), name="stand-in-info", daemon=True
        ).start()

    def _handler(self) -> type[socketserver.StreamRequestHandler]:
        states = self.states

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self.wfile.write(GREETING)
                asked = self.rfile.readline()
                if asked:  # else it only checked that the port is open
                    self.wfile.write(states.get(int(asked), b""))

        return Handler

    def ask(self, endpoint: str, request_id: int) -> bytes:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        while not self._is_closed.is_set():
            try:
                with socket.create_connection((host, int(port))) as connection:
                    connection.sendall(f"{request_id}\n".encode())
                    return b"".join(iter(lambda: connection.recv(65536), b"")).removeprefix(
                        GREETING
                    )
            except OSError:
                if not traps.is_on("dead_peer_blocks"):
                    raise
                self._is_closed.wait(0.05)
        raise ValueError("the executor is shut down")

    def close(self) -> None:
        """From any thread."""
        self._is_closed.set()
        self._server.shutdown()
        self._server.server_close()


def python_transceiver(args: Mapping[str, Any]) -> PythonTransceiver | None:
    """None for the C++ transceiver. Raises ValueError as `create_kv_cache_transceiver` does."""
    config = args["cache_transceiver_config"] or {}
    backend = config.get("backend")
    runtime = config.get("transceiver_runtime")
    if backend is None or runtime in (None, "CPP"):
        return None
    if backend not in ("NIXL", "DEFAULT"):
        raise ValueError(
            f"Python transceiver currently only supports the NIXL backend, got {backend}."
        )
    if config["kv_transfer_timeout_ms"] is None:
        raise ValueError("the Python transceiver needs a finite kv_transfer_timeout_ms")
    return PythonTransceiver()


class _State(msgspec.Struct, frozen=True):
    version: str
    kv_params: KvTransferParams
    expected: dict[str, Any]  # what decode must be given as it was answered


def context_answer(
    asked: Any,
    kv_params: KvTransferParams | None,
    request_id: int,
    first: Sequence[tuple[int, Any]],
    transceiver: PythonTransceiver | None,
) -> Any:
    """`outputs[0].disaggregated_params` of a context-only request.

    `request_type` is still that of the request.
    """
    assert kv_params is not None
    fields: dict[str, Any] = {
        "request_type": "context_only",
        "first_gen_tokens": [token for token, _ in first],
        "ctx_request_id": request_id,
    }
    if traps.is_on("draft_tokens"):
        fields["draft_tokens"] = list(_DRAFTS)
    if transceiver is not None:
        fields |= {"ctx_dp_rank": 0, "ctx_info_endpoint": transceiver.endpoint}
    if LINE >= (1, 3):
        fields["disagg_request_id"] = (
            None if traps.is_on("no_disagg_id") else asked.disagg_request_id
        )
        fields["ctx_usage"] = {"prompt_tokens": kv_params.prompt_tokens}
    expected = {
        name: value for name, value in fields.items() if name not in ("request_type", "ctx_usage")
    }
    if LINE >= (1, 3):  # both sides name the transfer by the id that context was asked with
        expected["disagg_request_id"] = asked.disagg_request_id
    state = encode(_State(VERSION, kv_params, expected))
    if LINE >= (1, 3) and first[0][1] is not None:
        fields["first_gen_log_probs"] = [[entry] for _, entry in first]
    if transceiver is not None:
        transceiver.states[request_id] = state
        state = None
    return DisaggregatedParams(**fields, opaque_state=state)


def transfer_params_of(params: Any, transceiver: PythonTransceiver | None) -> KvTransferParams:
    """Raises ValueError for parameters that are not what context-only answered."""
    data = params.opaque_state
    if transceiver is not None:
        data = transceiver.ask(params.ctx_info_endpoint, params.ctx_request_id)
    if not isinstance(data, bytes):
        raise ValueError(f"opaque_state must be bytes, not {type(data)}")
    try:
        state = decode(data, _State)
    except BadFrame as exc:
        raise ValueError("opaque_state was not made by a context request") from exc
    if state.version != VERSION:
        raise ValueError(f"opaque_state of TensorRT-LLM {state.version} can't be read by {VERSION}")
    for name, value in state.expected.items():
        if getattr(params, name, None) != value:
            raise ValueError(
                f"{name} is {getattr(params, name, None)!r}; context answered {value!r}"
            )
    return msgspec.structs.replace(
        state.kv_params, first_token_ids=token_ids(params.first_gen_tokens)
    )
