"""Check with whom an engine transfers KV: where it fetches KV, and who reads its KV.

The signatures of KV transfer parameters are checked before the engine gets a call, see `signer`.
"""

from __future__ import annotations

import hmac

from dynamo_trtllm.kv_transfer.keys import TransferKeys
from dynamo_trtllm.kv_transfer.prefill_addresses import PrefillAddresses
from dynamo_trtllm.kv_transfer.rejections import (
    CountRejection,
    Rejection,
    count_nothing,
    rejection,
)
from dynamo_trtllm.protocol.messages import KvTransferParams


class TransferGuard:
    """Checks where an engine fetches KV, and who reads its KV. Runs on the event loop.

    Args:
        keys: the keys of the deployment. None: a reader needs only the token of a transfer.
        addresses: the addresses that prefill workers have registered. None: all addresses are
            accepted.
        count: counts a rejection by its reason.
    """

    def __init__(
        self,
        keys: TransferKeys | None = None,
        *,
        addresses: PrefillAddresses | None = None,
        count: CountRejection = count_nothing,
    ) -> None:
        self._keys = keys
        self._addresses = addresses
        self._count = count

    async def check_address(self, kv_params: KvTransferParams, address: str) -> None:
        """Check that the prefill worker of a transfer has registered an address.

        Wait up to two seconds if the prefill worker is not registered yet.

        Args:
            kv_params: the KV transfer parameters of the transfer.
            address: "host:port" to which this worker is about to connect.

        Raises:
            TransferRejected: the prefill worker has not registered the address.
        """
        if self._addresses is None:
            return
        prefill_id = kv_params.prefill_instance_id
        registered = await self._addresses.addresses_of(prefill_id)
        if registered is None:
            raise rejection(
                kv_params,
                Rejection.UNKNOWN_PREFILL_WORKER,
                f"no prefill worker is registered as instance {prefill_id:x}",
                self._count,
            )
        # A worker registers no address if its release is older, or if its engine does not know
        # where the library listens. Then the address can't be checked.
        if registered and address not in registered:
            raise rejection(
                kv_params,
                Rejection.WRONG_ADDRESS,
                f"{address} is not a registered address of prefill worker {prefill_id:x}"
                f" ({', '.join(registered)})",
                self._count,
            )

    def reader_proof(self, transfer_id: str, token: bytes) -> bytes:
        """Return the value that this worker presents to read the KV of a transfer.

        Without keys, it is the token. With keys, it is a proof, which a stranger can't compute from
        an overheard token.

        Args:
            transfer_id: the id of the transfer.
            token: the token from the prefill worker, which has a fixed length.
        """
        if self._keys is None:
            return token
        return self._keys.reader_proof(transfer_id, token)

    def is_reader_proof(self, proof: bytes, transfer_id: str, token: bytes) -> bool:
        """Return whether a peer may read the KV of a transfer.

        Args:
            proof: the value that the peer presents.
            transfer_id: the id of the transfer.
            token: the token that this worker has created for the transfer.
        """
        if self._keys is None:
            return hmac.compare_digest(proof, token)
        return self._keys.is_reader_proof(proof, transfer_id, token)
