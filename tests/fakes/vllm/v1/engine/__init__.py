from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class EngineCoreOutput:
    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None


@dataclass(kw_only=True)
class EngineCoreOutputs:
    outputs: list[EngineCoreOutput] = field(default_factory=list)
