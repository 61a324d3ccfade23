"""Check an engine of your own against the promises that frontends and workers rely on.

Needs the extra `testing` (pytest). docs/own-engine.md describes its use.
"""

from dynamo_trtllm.testing.engine_contract import EngineContract
from dynamo_trtllm.testing.engine_requests import LIMITS

__all__ = ["LIMITS", "EngineContract"]
