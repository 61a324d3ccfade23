"""Sign KV transfer parameters at prefill workers, and check the signature at decode workers.

The parameters travel from the prefill worker over a frontend to the decode worker. Workers with
keys (`--kv-transfer-key-file`) sign the parameters. So a client of NATS without a key can't make a
decode worker connect, allocate memory or read KV. Frontends need no key, because they only name the
receivers, and pass the signed parameters on.

A signature covers the parameters, which contain the prefill instance and the expiry, and also the
request and the receivers. It is HMAC-SHA256 over these values in a fixed order.
"""

from __future__ import annotations

import heapq
import hmac
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from dynamo_trtllm.kv_transfer.keys import TransferKey, TransferKeys
from dynamo_trtllm.kv_transfer.rejections import (
    CountRejection,
    Rejection,
    count_nothing,
    rejection,
)
from dynamo_trtllm.protocol.errors import TransferExpired, TransferRejected
from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    KvTransferParams,
    TransferSignature,
    decode,
    encode,
)

_PURPOSE: Final = "dynamo_trtllm: KV transfer parameters 1"


class _Expiry(NamedTuple):
    """The time at which the signed parameters of a transfer expire."""

    expires_at: float
    transfer_id: str


class _UsedTransfers:
    """The transfers whose signed parameters were used. No other call may use them.

    Args:
        clock: returns seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._fetching: set[str] = set()  # ids of the transfers that calls are fetching
        # Ids of the transfers whose KV has arrived. An id is removed when its parameters expire,
        # because from then on they are rejected as expired.
        self._fetched: set[str] = set()
        self._expiries: list[_Expiry] = []  # a heap of the expiries of `_fetched`

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._fetching or transfer_id in self._fetched

    def begin(self, transfer_id: str) -> None:
        """Note that a call fetches a transfer."""
        self._fetching.add(transfer_id)

    def end(self, transfer_id: str) -> None:
        """Note that no call fetches a transfer any more."""
        self._fetching.discard(transfer_id)

    def add_fetched(self, transfer_id: str, expires_at: float) -> None:
        """Note that the KV of a transfer has arrived."""
        now = self._clock()
        while self._expiries and self._expiries[0].expires_at <= now:
            expired = heapq.heappop(self._expiries)
            self._fetched.discard(expired.transfer_id)
        self._fetched.add(transfer_id)
        heapq.heappush(self._expiries, _Expiry(expires_at, transfer_id))


class AdmittedFetch:
    """A decode call with signed parameters, which `TransferSigner.admit_fetch` has admitted.

    Until `end`, no other call may use the parameters. After `note_arrival`, no call may use them
    again.
    """

    __slots__ = ("_expires_at", "_transfer_id", "_used")

    def __init__(self, kv_params: KvTransferParams, used: _UsedTransfers) -> None:
        self._transfer_id = kv_params.transfer_id
        self._expires_at = kv_params.expires_at
        self._used = used
        used.begin(self._transfer_id)

    def note_arrival(self) -> None:
        """Note that the KV has arrived, so that no call can use the parameters again."""
        self._used.add_fetched(self._transfer_id, self._expires_at)

    def end(self) -> None:
        """End the call. If the KV has not arrived, another call may use the parameters."""
        self._used.end(self._transfer_id)


class TransferSigner:
    """Signs the KV transfer parameters of prefill calls, and checks those of decode calls.

    It runs on the event loop of the worker.

    Args:
        instance_id: the instance id of the worker.
        keys: the keys of the deployment. None: nothing is signed, and signed parameters are
            rejected.
        count: counts a rejection by its reason.
        clock: returns seconds since the epoch.
    """

    def __init__(
        self,
        instance_id: int,
        keys: TransferKeys | None = None,
        *,
        count: CountRejection = count_nothing,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._instance_id = instance_id
        self._keys = keys
        self._count = count
        self._clock = clock
        self._used = _UsedTransfers(clock)

    # --- prefill worker ---------------------------------------------------------------------------

    def check_prefill(self, request: GenerateRequest) -> None:
        """Check that a prefill call names the receivers of its KV, if this worker has a key.

        Raises:
            TransferRejected: the call names no receivers.
        """
        if self._keys is not None and not request.kv_receivers:
            self._count(Rejection.NO_RECEIVER)
            raise TransferRejected(
                "this prefill worker signs its KV transfers, and the call does not name the decode"
                " worker that may use them; upgrade the frontend, or start the workers without"
                " --kv-transfer-key-file"
            )

    def sign(
        self, kv_params: KvTransferParams, request_id: str, receivers: Sequence[int]
    ) -> KvTransferParams:
        """Return the parameters with a signature, or unchanged if this worker has no key."""
        if self._keys is None:
            return kv_params
        # The signature must cover the values as the decode worker decodes them. They may differ
        # from these: an engine may have given an integer for a float, which is encoded differently.
        as_read = decode(encode(kv_params), KvTransferParams)
        signature = _signature(self._keys.signing(), as_read, request_id, tuple(receivers))
        return msgspec.structs.replace(as_read, signature=signature)

    def reissue(self, kv_params: KvTransferParams, receivers: Sequence[int]) -> KvTransferParams:
        """Sign parameters of this worker again, for other receivers.

        Raises:
            TransferRejected: this worker has not signed the parameters.
            TransferExpired: the parameters have expired.
        """
        signature = self._verified(kv_params)
        prefill_id = kv_params.prefill_instance_id
        if prefill_id != self._instance_id:
            raise rejection(
                kv_params,
                Rejection.WRONG_PREFILL_WORKER,
                f"its KV is at instance {prefill_id:x}, and this is {self._instance_id:x}",
                self._count,
            )
        return self.sign(kv_params, signature.request_id, receivers)

    # --- decode worker ----------------------------------------------------------------------------

    def admit_fetch(self, kv_params: KvTransferParams, request_id: str) -> AdmittedFetch | None:
        """Check the parameters of a decode call, before anything is allocated for it.

        Returns:
            The fetch. The caller has to end it. None: nothing was checked, because this worker has
            no keys and the parameters have no signature.

        Raises:
            TransferRejected: the parameters are forged, used already, or not for this worker or
                request.
            TransferExpired: the parameters have expired.
        """
        if self._keys is None and kv_params.signature is None:
            return None
        signature = self._verified(kv_params)
        if signature.request_id != request_id:
            raise rejection(
                kv_params,
                Rejection.WRONG_REQUEST,
                f"it is for request {signature.request_id}, not {request_id}",
                self._count,
            )
        if self._instance_id not in signature.receivers:
            raise rejection(
                kv_params, Rejection.WRONG_RECEIVER, "it is for another decode worker", self._count
            )
        if kv_params.transfer_id in self._used:
            raise rejection(
                kv_params,
                Rejection.REPLAYED,
                "its parameters were used already; prefill again",
                self._count,
            )
        return AdmittedFetch(kv_params, self._used)

    def _verified(self, kv_params: KvTransferParams) -> TransferSignature:
        """Return the signature of parameters. Raises the errors of `admit_fetch`."""
        if self._keys is None:
            raise rejection(
                kv_params,
                Rejection.NO_KEY,
                "this worker has no keys, which signed KV transfers need; give all workers the"
                " same --kv-transfer-key-file",
                self._count,
            )
        signature = kv_params.signature
        if signature is None:
            raise rejection(
                kv_params,
                Rejection.UNSIGNED,
                "it is not signed, and this worker has keys; give all workers the same"
                " --kv-transfer-key-file, and upgrade older frontends, which drop signatures",
                self._count,
            )
        key = self._keys.find(signature.key_id)
        if key is None:
            raise rejection(
                kv_params,
                Rejection.UNKNOWN_KEY,
                f"it is signed with key {signature.key_id}, and this worker has"
                f" {self._keys.ids()}; give all workers the same --kv-transfer-key-file",
                self._count,
            )
        expected = _signature(key, kv_params, signature.request_id, signature.receivers)
        if not hmac.compare_digest(signature.mac, expected.mac):
            raise rejection(
                kv_params,
                Rejection.FORGED,
                "its signature is wrong: a value was changed",
                self._count,
            )
        late_s = self._clock() - kv_params.expires_at
        if late_s >= 0:
            self._count(Rejection.EXPIRED)
            raise TransferExpired(f"KV transfer {kv_params.transfer_id} expired {late_s:.1f} s ago")
        return signature


def _signature(
    key: TransferKey, kv_params: KvTransferParams, request_id: str, receivers: tuple[int, ...]
) -> TransferSignature:
    # Values of MessagePack contain their lengths. So two different lists of values never have the
    # same bytes. The order is part of the format. If a field is added to the parameters, the text
    # of _PURPOSE must change.
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
