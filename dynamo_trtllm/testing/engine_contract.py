"""The whole contract of engines, as one class of tests."""

from __future__ import annotations

from dynamo_trtllm.testing.generation_contract import GenerationContract
from dynamo_trtllm.testing.kv_transfer_contract import KvTransferContract
from dynamo_trtllm.testing.lifecycle_contract import LifecycleContract


class EngineContract(GenerationContract, LifecycleContract, KvTransferContract):
    """What frontends and workers rely on, as tests for pytest.

    Subclass it as a class whose name begins with `Test`, and define `create_engine`. Tests of what
    the engine can't do are skipped, with the reason.
    """
