"""Create and read the KV transfer parameters of vLLM engines, release unfetched KV, and choose the
addresses at which NixlConnector listens.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec

from dynamo_trtllm.engines.external.external_transfers import EngineState, decode_state
from dynamo_trtllm.engines.vllm.requests import EXPIRES_AT, READ_TIMES, FetchedKv
from dynamo_trtllm.protocol.counted import counted
from dynamo_trtllm.protocol.errors import ConfigError, RequestRejected, TransferMismatch
from dynamo_trtllm.protocol.messages import KvTransferParams, encode
from dynamo_trtllm.protocol.number_text import is_digits
from dynamo_trtllm.protocol.number_types import Count, Int64, Port, PositiveCount
from dynamo_trtllm.support.network.addresses import free_ports, host_and_port

log = logging.getLogger(__name__)

ENGINE_STATE_VERSION = 1


class RequiredParams(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that NixlConnector's `request_finished` returns in all releases, and that the decode
    engine needs.

    Newer releases add keys, such as the generation of the registered memory. Added keys are passed
    on unchecked.

    The types are checked strictly, because vLLM's engine process uses the values as they are, and
    an exception ends this process. So a number that was sent as text is rejected.
    """

    do_remote_prefill: bool
    do_remote_decode: bool
    remote_block_ids: list[list[Count]]  # block ids of each KV cache group
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: Port
    tp_size: PositiveCount | None = None  # ranks of the prefill engine
    remote_num_tokens: Count | None = None


class _VllmState(EngineState, frozen=True, kw_only=True):
    params: dict[str, Any]  # parameters with the keys of `RequiredParams`
    # The seed that the prefill engine drew for a request without one, so that both engines sample
    # the same first token. None: no seed was drawn.
    seed: Int64 | None = None


def pack(params: Mapping[str, Any] | None, *, release: str, seed: int | None) -> bytes:
    """Return the engine's part of the KV transfer parameters.

    Raises:
        RequestRejected: the connector returned no parameters, or parameters of an unknown form.
    """
    if not params or not params.get("remote_block_ids"):
        raise RequestRejected(
            "vLLM's connector has no KV to transfer; see NixlConnector's lines in its log",
            field="kv_transfer_config",
        )
    try:
        msgspec.convert(params, RequiredParams)
    except msgspec.ValidationError as exc:
        raise RequestRejected(
            f"vLLM {release} returned unknown kv_transfer_params: {exc}", field="kv_transfer_config"
        ) from exc
    state = _VllmState(
        version=ENGINE_STATE_VERSION, release=release, params=dict(params), seed=seed
    )
    return encode(state)


def unpack(kv_params: KvTransferParams) -> FetchedKv:
    """Decode the engine's part of KV transfer parameters.

    Raises:
        TransferMismatch: the parameters are from another engine or version. The error names the
            field.
    """
    engine_state = decode_state(kv_params, _VllmState, ENGINE_STATE_VERSION)
    try:
        msgspec.convert(engine_state.params, RequiredParams)
    except msgspec.ValidationError as exc:
        raise TransferMismatch(
            f"KV transfer {kv_params.transfer_id}: its parameters for vLLM can't be used: {exc}",
            field="opaque",
        ) from exc
    params = engine_state.params | {EXPIRES_AT: kv_params.expires_at}
    return FetchedKv(
        first_token=kv_params.first_token_ids[0], seed=engine_state.seed, kv_transfer_params=params
    )


def side_channel_of(fetched: FetchedKv) -> str:
    """Return the "host:port" to which NixlConnector connects for the handshake."""
    params = fetched.kv_transfer_params
    return host_and_port(params["remote_host"], params["remote_port"])


_PARTS = ("kv_transfer.queue", "kv_transfer.post", "kv_transfer.read", "kv_transfer.notice")


def read_parts(queued_s: float, params: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the seconds of each part of a decode call's wait for its KV.

    The result is {} if the connector did not note the times.

    Args:
        queued_s: when vLLM's engine process queued the request.
        params: `kv_transfer_params` of the last output. Its entry READ_TIMES has the times at which
            the KV blocks were allocated, the read was posted, a rank saw the end of the read, and
            the scheduler was notified.
    """
    ends = (params or {}).get(READ_TIMES, ())
    if len(ends) != len(_PARTS):
        return {}
    parts = {}
    begin = queued_s
    for part, end in zip(_PARTS, ends, strict=True):
        parts[part] = end - begin
        begin = end
    return parts


_MAX_TRIES = 4
_RETRY_INTERVAL_S = 0.25
# Time after the expiry of a transfer in which a decode engine whose clock is behind may still read.
_GRACE_S = 1.0

# Releases the KV of the requests with these ids. Returns the ids that each vLLM worker released.
Release = Callable[[list[str]], Awaitable[Iterable[Iterable[str]]]]


class KvReleaser:
    """The task that frees KV in vLLM's worker processes, in batches.

    A worker process knows the id of a prefill call only once the lease of its KV has started, which
    may be after the end of the call. So an id that no worker process knows is tried again.
    """

    def __init__(self, release: Release) -> None:
        """Initialize without requests. `release` calls the worker processes."""
        self._release = release
        # The number of earlier attempts, by the id of the call whose KV is to be freed.
        self._wanted: dict[str, int] = {}
        self._wake = asyncio.Event()
        self._timers: set[asyncio.TimerHandle] = set()  # timers of ids that are posted later
        self._task: asyncio.Task[None] | None = None

    def post(self, request_id: str, *, has_expired: bool = False) -> None:
        """Free the KV of a call.

        If its transfer has expired, the KV is freed after _GRACE_S seconds, otherwise at once.
        """
        if has_expired:
            self._post_later(request_id, num_tries=0, wait_s=_GRACE_S)
        else:
            self._post(request_id, num_tries=0)

    def _post(self, request_id: str, num_tries: int) -> None:
        self._wanted[request_id] = num_tries
        self._wake.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="vllm-reclaim")

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch = self._wanted
            self._wanted = {}
            try:
                released = await self._release(sorted(batch))
            except Exception as exc:  # noqa: BLE001 - logged; the next batch is released all the same
                log.warning(
                    "vLLM could not free the KV of %s, which stays until the lease ends: %s",
                    counted(len(batch), "request"),
                    exc,
                )
                continue
            freed = set(itertools.chain.from_iterable(released))
            for request_id, num_earlier_tries in batch.items():
                num_tries = num_earlier_tries + 1
                if request_id not in freed and num_tries < _MAX_TRIES:
                    self._post_later(request_id, num_tries, _RETRY_INTERVAL_S)

    def _post_later(self, request_id: str, num_tries: int, wait_s: float) -> None:
        def post() -> None:
            self._timers.discard(timer)
            self._post(request_id, num_tries)

        timer = asyncio.get_running_loop().call_later(wait_s, post)
        self._timers.add(timer)

    async def aclose(self) -> None:
        """Stop releasing KV. Idempotent."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        task = self._task
        self._task = None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"


def choose_side_channel(
    kv_transfer_host: str, ranks: int, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Choose where NixlConnector listens for handshakes.

    The variables HOST and PORT of the environment set the address. Without them, NixlConnector
    listens on `kv_transfer_host`, at free ports.

    Args:
        kv_transfer_host: an address of this host that all workers can reach.
        ranks: the number of data-parallel ranks. The first rank uses the chosen port, and each
            further rank the next higher port.

    Returns:
        The entries of `kv_connector_extra_config` that pass the address to vLLM's processes.

    Raises:
        ConfigError: the environment has an invalid port, or no ports are free.
    """
    host = environment.get(HOST) or kv_transfer_host
    port = environment.get(PORT)
    if port is None:
        first_port = free_ports(ranks, host)
        return {"side_channel_host": host, "side_channel_port": first_port}
    if not (is_digits(port) and 0 < int(port) <= 65_536 - ranks):
        raise ConfigError(
            f"{PORT} is {port!r}; set it to the first of {ranks} consecutive ports up to 65535, or"
            " unset it"
        )
    return {"side_channel_host": host, "side_channel_port": int(port)}


def side_channels(channel: Mapping[str, Any], ranks: int) -> tuple[str, ...]:
    """Return the "host:port" of each rank's side channel.

    `channel` is the result of `choose_side_channel`.
    """
    host = channel["side_channel_host"]
    first_port = channel["side_channel_port"]
    return tuple(host_and_port(host, port) for port in range(first_port, first_port + ranks))


def set_listen_address(scheduler: Any, config: Any) -> None:
    """Set the address of the side channel in the connector's scheduler.

    The scheduler listens there once the KV caches are registered.
    """
    extra = config.kv_transfer_config.kv_connector_extra_config
    scheduler.side_channel_host = extra["side_channel_host"]
    rank = config.parallel_config.data_parallel_index
    scheduler.side_channel_port = extra["side_channel_port"] + rank
