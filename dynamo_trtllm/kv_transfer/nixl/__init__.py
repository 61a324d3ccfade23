"""Transfer KV over NIXL's UCX backend.

The decode worker reads the prefill worker's memory with one-sided reads.

Only `bindings` imports NIXL. The target can't reject a one-sided read, and over shared memory a
read succeeds even after deregistration. Every published transfer therefore has a validity slot that
readers check, see `validity`.
"""

from dynamo_trtllm.kv_transfer.nixl.backend import NixlBackend

__all__ = ["NixlBackend"]
