"""Check that the transceiver of a prefill worker is alive before a decode call uses it."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from dynamo_trtllm.protocol.errors import TransferFailed

_PROBE_VALID_S = 1.0
# ZeroMQ's signature, which libzmq sends before it has read anything.
_GREETING_BYTES = 10
_SIGNATURE = (0xFF, 0x7F)  # the first and the last byte of a signature


class EndpointProbe:
    """Checks that Python transceivers of prefill workers are alive, before a decode call uses them.

    A decode engine asks a prefill engine for KV on the loop of its executor, without a time limit.
    If the prefill engine is gone, the whole decode engine stops. NVIDIA's gRPC adapter to
    TensorRT-LLM, OpenEngine, probes the endpoint for the same reason.

    The endpoint is a ROUTER socket of ZeroMQ (_torch/disaggregation/native/messenger.py, 0825635c).
    A thread of its process greets each connection. A frozen process still accepts connections, but
    does not greet them, so the probe waits for the greeting.

    Discovery is not asked, because a worker that drains is not registered, but its KV is still
    fetched.

    Args:
        timeout_s: longest time for a probe.
    """

    def __init__(self, timeout_s: float = 2.0) -> None:
        self._timeout_s = timeout_s
        self._probes: dict[str, asyncio.Task[None]] = {}

    async def check(self, endpoint: str) -> None:
        """Connect to an endpoint and wait for its greeting, unless another call did so within the
        last second.

        Raises:
            TransferFailed: the endpoint does not accept a connection, or does not greet.
        """
        address = urlsplit(endpoint)
        if address.scheme != "tcp" or not address.hostname or not address.port:
            # Only an address of TCP can be probed.
            return
        probe = self._probes.get(endpoint)
        if probe is None:
            probe = asyncio.create_task(_connect(address.hostname, address.port, self._timeout_s))
            self._probes[endpoint] = probe
            probe.add_done_callback(lambda _: self._forget_later(endpoint))
        try:
            await asyncio.shield(probe)
        except OSError as exc:
            reason = str(exc)
            if isinstance(exc, TimeoutError):
                reason = f"no answer within {self._timeout_s:g} s"
            raise TransferFailed(
                f"the prefill worker's transceiver at {endpoint} is unreachable: {reason}"
            ) from exc

    def _forget_later(self, endpoint: str) -> None:
        asyncio.get_running_loop().call_later(_PROBE_VALID_S, self._probes.pop, endpoint, None)


async def _connect(host: str, port: int, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            greeting = await reader.readexactly(_GREETING_BYTES)
        except asyncio.IncompleteReadError as exc:
            raise ConnectionError("it closed the connection") from exc
        finally:
            writer.close()
    if (greeting[0], greeting[-1]) != _SIGNATURE:
        raise ConnectionError("another program listens there")
