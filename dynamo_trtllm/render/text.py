"""Bytes of tokens to text, incrementally: never half a UTF-8 character, linear in the bytes."""

from __future__ import annotations

import codecs
from collections.abc import Callable

from dynamo_trtllm.messages import TokenIds
from dynamo_trtllm.render.base import Delta


class BytesTextParser:
    """OutputParser for a plain prompt, for vocabularies whose tokens are byte strings; all text is content."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes  # no bytes for a token that must not be shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: TokenIds) -> Delta:
        return Delta(content=self._decoder.decode(b"".join(map(self._token_bytes, token_ids))))

    def finish(self) -> Delta:
        return Delta(content=self._decoder.decode(b"", final=True))
