from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

_KNOWN = (
    "max_tokens min_tokens temperature top_p top_k min_p frequency_penalty presence_penalty"
    " repetition_penalty logit_bias seed stop_token_ids ignore_eos logprobs detokenize extra_args"
    " structured_outputs output_kind prompt_logprobs"
).split()


class RequestOutputKind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(SimpleNamespace):
    def __init__(self, **values: Any) -> None:
        for name in values:
            if name not in _KNOWN:
                raise TypeError(f"Unexpected keyword argument '{name}'")
        if values["max_tokens"] < 1:
            raise ValueError(f"max_tokens must be at least 1, got {values['max_tokens']}.")
        if values["min_tokens"] > values["max_tokens"]:
            raise ValueError("min_tokens must be less than or equal to max_tokens")
        super().__init__(
            **{"extra_args": None, "structured_outputs": None, "prompt_logprobs": None, **values}
        )


class StructuredOutputsParams(SimpleNamespace):
    def __init__(self, **values: Any) -> None:
        if len(values) != 1:
            raise ValueError("You must use one kind of structured outputs constraint")
        super().__init__(**values)
