"""Report failed reads of KV to the scheduler, which ends their requests.

If layers are in several KV groups (sliding window and full attention, as in gpt-oss), a failed read
does not end its request. `_handle_failed_transfer` marks no block as failed, so the request counts
as received and is answered from memory that was never written. This memory also enters the prefix
cache.

A request that was aborted in the queue can even end the engine if its handshake fails: the
scheduler learns of an ended read of a request that it no longer has.

From 0.30 on vLLM itself reports failed reads. It also keeps the blocks of a read whose handle it
could not release, because the device may still write to them. If this patch ended the request
early, these blocks would be freed. So the patch must not be used there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dynamo_trtllm.engines.vllm.patches.patch import Patch, apply
from dynamo_trtllm.engines.vllm.releases import PACKAGE

PATCH = Patch(
    name="failed_reads",
    fault="a request whose KV could not be read is answered from memory that was never written",
    upstream="https://github.com/vllm-project/vllm/issues/52234",
    needed_in="0.24 to 0.29",
    detection="`KVConnectorBase_V1` has no `get_transfer_results`",
    goes="with 0.29",
    is_vital=True,
)


def is_needed() -> bool:
    """Return whether vLLM itself does not report failed reads."""
    module = "vllm.distributed.kv_transfer.kv_connector.v1.base"
    connector = PACKAGE.find("KVConnectorBase_V1", module)
    return not hasattr(connector, "get_transfer_results")


def watch(worker: Any, note: Callable[[str], None]) -> bool:
    """Call `note` with the id of each request whose read has failed.

    `note` is called before vLLM counts the request as received.

    Args:
        worker: the worker half of vLLM's NixlConnector.
        note: is called on any thread.

    Returns:
        False if vLLM itself reports failed reads.

    Raises:
        EngineFailed: vLLM does not report failed reads, and has no method to wrap for that.
    """

    def install() -> None:
        handle = worker._handle_failed_transfer

        @functools.wraps(handle)
        def recording(req_id: str, *args: Any, **keywords: Any) -> Any:
            meta = worker._recving_metadata.get(req_id)
            if meta is not None and not any(meta.local_block_ids):
                # The request was aborted before it had blocks. Its handshake was only to free the
                # KV at the prefill engine. If vLLM counted it as an ended read, the engine would
                # end, because the scheduler no longer knows the request.
                worker._recving_metadata.pop(req_id)
                return None
            note(req_id)
            return handle(req_id, *args, **keywords)

        worker._handle_failed_transfer = recording

    return apply(PATCH, is_needed, install)
