"""KV over NIXL's UCX back end: the decode side reads the prefill side's memory, which does nothing meanwhile.

`bindings` alone names the package. A one-sided read can't be refused by its target (over shared memory it even succeeds
after deregistration), so every offer has a guard, see `validity_slots`.
"""

from dynamo_trtllm.kv_transfer.nixl.backend import NixlBackend

__all__ = ["NixlBackend"]
