"""Sign KV transfer parameters at prefill workers, and reject wrong ones at decode workers.

The parameters travel from the prefill worker over a frontend to the decode worker. Workers with
keys (`--kv-transfer-key-file`) sign them, so that no client of NATS without a key can make a decode
worker connect, allocate memory or read KV. Frontends need no key: they name the receivers, and pass
the signed parameters on.

A signature covers the parameters, which include the prefill instance and the expiry, the request,
and the receivers. It is HMAC-SHA256 over the values in a fixed order.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from dynamo_trtllm.kv_transfer.keys import TransferKey, TransferKeys
from dynamo_trtllm.kv_transfer.prefill_addresses import PrefillAddresses
from dynamo_trtllm.protocol.errors import TransferExpired, TransferRejected
from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    KvTransferParams,
    TransferSignature,
    decode,
    encode,
)

_PURPOSE: Final = "dynamo_trtllm: KV transfer parameters 1"


class Rejection(StrEnum):
    """The reasons for which a decode worker rejects KV transfer parameters."""

    UNSIGNED = "unsigned"
    NO_KEY = "no_key"
    UNKNOWN_KEY = "unknown_key"
    FORGED = "forged"
    WRONG_REQUEST = "wrong_request"
    WRONG_RECEIVER = "wrong_receiver"
    EXPIRED = "expired"
    REPLAYED = "replayed"
    UNKNOWN_HOLDER = "unknown_holder"
    WRONG_ADDRESS = "wrong_address"


class TransferGuard:
    """Signs and checks the KV transfer parameters of one worker.

    Runs on the event loop.

    Args:
        instance_id: of the worker.
        keys: of the deployment; None: nothing is signed, and signed parameters are rejected.
        addresses: registered addresses of prefill workers; None: addresses are not checked.
        count: counts a rejection by its reason.
        clock: returns seconds since the epoch.
    """

    def __init__(
        self,
        instance_id: int,
        keys: TransferKeys | None = None,
        *,
        addresses: PrefillAddresses | None = None,
        count: Callable[[Rejection], None] = lambda reason: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.keys = keys
        self._instance_id = instance_id
        self._addresses = addresses
        self._count = count
        self._clock = clock
        self._fetching: set[str] = set()  # ids of transfers that calls fetch now
        # Id of each transfer whose KV has arrived -> its expiry, after which it is forgotten:
        # then, it is rejected as expired.
        self._fetched: dict[str, float] = {}

    # --- prefill worker ---------------------------------------------------------------------------

    def check_prefill(self, request: GenerateRequest) -> None:
        """Check that a prefill call names the receivers of its KV, if they are signed.

        Raises:
            TransferRejected: it names none.
        """
        if self.keys is not None and not request.kv_receivers:
            raise TransferRejected(
                "this prefill worker signs its KV transfers, and the call does not name the decode"
                " worker that may use them; upgrade the frontend, or start the workers without"
                " --kv-transfer-key-file"
            )

    def sign(
        self, kv_params: KvTransferParams, request_id: str, receivers: Sequence[int]
    ) -> KvTransferParams:
        """Return the parameters with a signature, or unchanged if this worker has no key."""
        if self.keys is None:
            return kv_params
        # As their reader decodes them: an engine may have given an integer for a float.
        as_read = decode(encode(kv_params), KvTransferParams)
        signature = _signature(self.keys.signing(), as_read, request_id, tuple(receivers))
        return msgspec.structs.replace(as_read, signature=signature)

    def reissue(self, kv_params: KvTransferParams, receivers: Sequence[int]) -> KvTransferParams:
        """Sign parameters of this worker again, for other receivers.

        Raises:
            TransferRejected: this worker has not signed them.
            TransferExpired: they have expired.
        """
        signature = self._verified(kv_params)
        if kv_params.prefill_instance_id != self._instance_id:
            raise self._rejected(
                kv_params,
                Rejection.UNKNOWN_HOLDER,
                f"its KV is at instance {kv_params.prefill_instance_id:x}, not here",
            )
        return self.sign(kv_params, signature.request_id, receivers)

    # --- decode worker ----------------------------------------------------------------------------

    def begin_fetch(self, kv_params: KvTransferParams, request_id: str) -> None:
        """Check the parameters of a decode call, before anything is allocated for it.

        If this returns, `end_fetch` must follow.

        Raises:
            TransferRejected: they are forged, used already, or not for this worker or request.
            TransferExpired: they have expired.
        """
        if self.keys is None and kv_params.signature is None:
            return
        signature = self._verified(kv_params)
        if signature.request_id != request_id:
            raise self._rejected(
                kv_params,
                Rejection.WRONG_REQUEST,
                f"it is for request {signature.request_id}, not {request_id}",
            )
        if self._instance_id not in signature.receivers:
            raise self._rejected(
                kv_params, Rejection.WRONG_RECEIVER, "it is for another decode worker"
            )
        transfer_id = kv_params.transfer_id
        if transfer_id in self._fetching or transfer_id in self._fetched:
            raise self._rejected(
                kv_params, Rejection.REPLAYED, "its parameters were used already; prefill again"
            )
        self._fetching.add(transfer_id)

    def note_fetched(self, kv_params: KvTransferParams) -> None:
        """Note that the KV of a call has arrived: its parameters can't be used again."""
        if kv_params.signature is None:
            return
        now = self._clock()
        # Those that were fetched first come first, and usually expire first.
        while self._fetched:
            oldest = next(iter(self._fetched))
            if self._fetched[oldest] > now:
                break
            del self._fetched[oldest]
        self._fetched[kv_params.transfer_id] = kv_params.expires_at

    def end_fetch(self, kv_params: KvTransferParams) -> None:
        """End the call that `begin_fetch` admitted.

        If its KV has not arrived, another call may use the parameters.
        """
        self._fetching.discard(kv_params.transfer_id)

    async def check_address(self, kv_params: KvTransferParams, address: str) -> None:
        """Check that the prefill worker of a transfer has registered an address.

        Args:
            kv_params: of the transfer.
            address: "host:port" to which this worker is about to connect.

        Raises:
            TransferRejected: it has not.
        """
        if self._addresses is None:
            return
        holder_id = kv_params.prefill_instance_id
        registered = await self._addresses.addresses_of(holder_id)
        if registered is None:
            raise self._rejected(
                kv_params,
                Rejection.UNKNOWN_HOLDER,
                f"no prefill worker is registered as instance {holder_id:x}",
            )
        # Without addresses, the engine's library chooses them, or the worker is older.
        if registered and address not in registered:
            raise self._rejected(
                kv_params,
                Rejection.WRONG_ADDRESS,
                f"{address} is not a registered address of prefill worker {holder_id:x}"
                f" ({', '.join(registered)})",
            )

    def _verified(self, kv_params: KvTransferParams) -> TransferSignature:
        """Return the signature of parameters, if it is valid and they have not expired."""
        signature = kv_params.signature
        if signature is None:
            raise self._rejected(
                kv_params,
                Rejection.UNSIGNED,
                "it is not signed, and this worker has keys; give all workers the same"
                " --kv-transfer-key-file, and upgrade older frontends, which drop signatures",
            )
        if self.keys is None:
            raise self._rejected(
                kv_params,
                Rejection.NO_KEY,
                "it is signed, and this worker has no keys; give all workers the same"
                " --kv-transfer-key-file",
            )
        key = self.keys.find(signature.key_id)
        if key is None:
            raise self._rejected(
                kv_params,
                Rejection.UNKNOWN_KEY,
                f"it is signed with key {signature.key_id}, and this worker has {self.keys.ids()};"
                " give all workers the same --kv-transfer-key-file",
            )
        expected = _signature(key, kv_params, signature.request_id, signature.receivers)
        if not hmac.compare_digest(signature.mac, expected.mac):
            raise self._rejected(
                kv_params, Rejection.FORGED, "its signature is wrong: a value was changed"
            )
        late_s = self._clock() - kv_params.expires_at
        if late_s >= 0:
            self._count(Rejection.EXPIRED)
            raise TransferExpired(f"KV transfer {kv_params.transfer_id} expired {late_s:.1f} s ago")
        return signature

    def _rejected(
        self, kv_params: KvTransferParams, reason: Rejection, why: str
    ) -> TransferRejected:
        """Count a rejection, and return the error to raise."""
        self._count(reason)
        return TransferRejected(f"KV transfer {kv_params.transfer_id} was rejected: {why}")


def _signature(
    key: TransferKey, kv_params: KvTransferParams, request_id: str, receivers: tuple[int, ...]
) -> TransferSignature:
    # MessagePack values carry their lengths, so no two lists of values have the same bytes. The
    # order is part of the format: a new field of the parameters needs a new purpose.
    signed = (
        _PURPOSE,
        request_id,
        receivers,
        kv_params.version,
        kv_params.transfer_id,
        kv_params.engine,
        kv_params.model,
        kv_params.layout,
        sorted(kv_params.kv_compat.items()),
        kv_params.prefill_instance_id,
        kv_params.expires_at,
        kv_params.prompt_tokens,
        kv_params.first_token_ids,
        kv_params.first_logprobs,
        kv_params.transport,
        kv_params.kv_bytes,
        kv_params.engine_state,
    )
    mac = hmac.digest(key.secret, encode(signed), "sha256")
    return TransferSignature(key.key_id, request_id, receivers, mac)
