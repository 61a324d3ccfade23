"""Constrain output to a format: keep the state of the format, and mask tokens that the format does
not allow next.

The state depends on the output tokens alone. A decode worker rebuilds the state from the first
token, which is in the KV transfer parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from dynamo_trtllm.engines.torch.format_compiler import Triggered

LEFT_FORMAT: Final = (
    "the output does not follow this format, which may be too complex; simplify it, or try again"
)


class GrammarMatcher:
    """The grammar state of one request. Not thread-safe.

    `failure` is the reason once the output can no longer follow the grammar; None before.

    Args:
        grammars: at least one grammar. The output follows the grammar whose trigger comes first.
        stop_ids: tokens that are allowed where the grammar can end, and end the output.
        unfinished_ids: tokens that may not come before the trigger.
        size: the size of the vocabulary.
        on_failure: called once the output can no longer follow the grammar.
    """

    def __init__(
        self,
        grammars: Sequence[Triggered],
        stop_ids: tuple[int, ...],
        unfinished_ids: tuple[int, ...],
        size: int,
        on_failure: Callable[[], None],
    ) -> None:
        self.failure: str | None = None
        self._on_failure = on_failure
        self._grammars = grammars
        self._matcher = grammars[0].matcher
        self._stop_ids = list(stop_ids)
        self._unfinished_ids = list(unfinished_ids)
        # The newest output tokens, with which a trigger may have begun. None once the output
        # follows `_matcher`, because a trigger has come or there are no triggers.
        self._before_trigger: list[int] | None = [] if grammars[0].trigger_ids else None
        self._longest_trigger = max(len(grammar.trigger_ids) for grammar in grammars)
        self._mask_words = np.zeros((size + 31) // 32, dtype=np.int32)
        self._size = size

    def accept_token(self, token_id: int) -> None:
        """Advance the state by the next output token."""
        if self._before_trigger is not None:
            self._before_trigger = [*self._before_trigger, token_id][-self._longest_trigger :]
            for trigger_ids, matcher in self._grammars:
                if tuple(self._before_trigger[-len(trigger_ids) :]) == trigger_ids:
                    self._matcher = matcher
                    self._before_trigger = None
                    return
        elif token_id not in self._stop_ids and not self._matcher.consume_token(token_id):
            reason = self._matcher.get_error()
            self._fail(reason or f"token {token_id} is not allowed by the grammar")

    def apply_mask(self, logits: Tensor) -> None:
        """Set the logits of tokens that the grammar does not allow next to -inf, in place.

        Args:
            logits: [vocabulary].
        """
        if self._before_trigger is not None:
            if self._unfinished_ids:
                logits[self._unfinished_ids] = -torch.inf
            return
        allowed = self._allowed()
        logits.masked_fill_(~torch.from_numpy(allowed).to(logits.device), -torch.inf)

    def _allowed(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return the mask of allowed tokens, bool [vocabulary]."""
        is_over = self.failure is not None or self._matcher.is_stopped()
        can_end = is_over or self._matcher.is_accepting()
        if is_over:
            allowed = np.zeros(self._size, dtype=np.bool_)
        else:
            self._matcher.unsafe_compute_mask_ptr(
                self._mask_words.ctypes.data, self._mask_words.nbytes
            )
            bits = np.unpackbits(self._mask_words.view(np.uint8), bitorder="little")
            allowed = bits[: self._size].view(np.bool_)
        if can_end:
            allowed[self._stop_ids] = True
        if self._matcher.is_error():
            self._fail(self._matcher.get_error())
        return allowed

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self._on_failure()
