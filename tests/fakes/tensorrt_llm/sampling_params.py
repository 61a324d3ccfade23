"""`SamplingParams` and `GuidedDecodingParams` of the played release."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tensorrt_llm.standin import traps
from tensorrt_llm.standin.release import LINE, fields_class


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None

    def _validate(self) -> None:
        given = [self.json, self.regex, self.grammar, self.json_object or None, self.structural_tag]
        if sum(value is not None for value in given) > 1:
            raise ValueError("Only one guide can be used for a request")


def _is_greedy(self: Any) -> bool:
    if LINE >= (1, 2):
        unset = self.temperature is None and self.top_p is None and self.top_k is None
        return unset or self.top_k == 1 or self.top_p == 0 or self.temperature == 0
    return self.top_k in (None, 1) and self.top_p in (None, 0)


def _validate(self: Any) -> None:
    if LINE >= (1, 2):
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
        for name in ("top_k", "temperature"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ValueError(f"require {name} >= 0, got {name}={getattr(self, name)}")
    best_of = self.n if self.best_of is None else self.best_of
    if best_of < self.n:
        raise ValueError(f"In beam search, best_of={best_of} must be at least n={self.n}")
    allowed = os.environ.get("TLLM_ALLOW_N_GREEDY_DECODING")
    if best_of > 1 and self._greedy_decoding and not self.use_beam_search and not allowed:
        raise ValueError("Greedy decoding in the LLM API does not allow multiple returns")
    if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
        raise ValueError(f"truncate_prompt_tokens must be >= 1, got {self.truncate_prompt_tokens}")
    if self.guided_decoding is not None:
        self.guided_decoding._validate()


def _setup(self: Any, eos_token_ids: tuple[int, ...]) -> Any:
    """Called only when `end_id` is None.

    What the tokenizer and the generation config say goes on the object.
    """
    self.end_id = eos_token_ids[0]
    if self.pad_id is None:
        self.pad_id = self.end_id
    self._stop_word_ids = []
    if LINE >= (1, 2) and traps.is_on("setup_changes_caller"):
        self.stop_token_ids = [*(self.stop_token_ids or []), *eos_token_ids[1:]]
    return self


def _get_stop_words(self: Any) -> list[list[int]]:
    if self.stop is not None and self._stop_word_ids is None:
        raise RuntimeError(
            f"stop={self.stop!r} is not processed by tokenizer, please call the setup method"
        )
    return [[token] for token in self.stop_token_ids or []]


SamplingParams: Any = fields_class(
    "SamplingParams",
    {
        "__post_init__": _validate,
        "__module__": __name__,
        "_setup": _setup,
        "_get_stop_words": _get_stop_words,
        "_greedy_decoding": property(_is_greedy),
    },
    internal={"_stop_word_ids": None},
    slots=LINE >= (1, 2),
    kw_only=LINE >= (1, 2),
)
