"""Every rule about one role. A rule's name is public: docs/preflight.md and alerts use it."""

from __future__ import annotations

from dynamo_trtllm.engines.trtllm.preflight import capacity, environment, hardware, lengths, parallel, transfer, values

ROLE_RULES = (
    *values.RULES,
    *lengths.RULES,
    *parallel.RULES,
    *transfer.RULES,
    *environment.RULES,
    *hardware.RULES,
    *capacity.RULES,
)
