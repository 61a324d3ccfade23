"""Parse the body of a request: on the event loop if that is quick, else in a thread."""

from __future__ import annotations

import re
from typing import TypeVar

from dynamo_trtllm.api.request_model import RequestModel, parse
from dynamo_trtllm.api.unknown_fields import IgnoredFields
from dynamo_trtllm.background import in_thread
from dynamo_trtllm.frontend.requests.timeline import RequestTimeline
from dynamo_trtllm.tokenization.renderer import INLINE_BYTES

M = TypeVar("M", bound=RequestModel)

# Messages, tools and parts of them. Each takes as long as half a kilobyte of text.
_MANY_OBJECTS = 500
# Code in a message has braces, too: there, a quotation mark is escaped.
_OBJECT = re.compile(rb'\{[ \t\n\r]*["}]')
# The time is limited for which the event loop plans larger bodies before it does other work.
TURN_BYTES = 16 << 10
# Of text without words, which takes up to twenty times as long to tokenize.
_WORDLESS_BYTES = 48 << 10
_SAMPLED = 61  # one byte of so many is looked at
_BYTES_PER_BLANK = 16  # more of them: text without words. English and code have 4 to 8


class RequestBody:
    """The body of a request, until the request is planned.

    Args:
        data: its bytes.
        timeline: that of the request.
    """

    def __init__(self, data: bytes, timeline: RequestTimeline) -> None:
        self.data = data
        self.is_large = is_large_body(data)
        self.timeline = timeline

    async def parse(self, model: type[M], unknown: IgnoredFields | None) -> M:
        """Parse the body, a large one in a thread. `unknown`: collects unknown fields.

        Raises as `request_model.parse`.
        """
        self.timeline.enter("tokenize")
        if self.is_large:
            return await in_thread(parse, model, self.data, unknown)
        return parse(model, self.data, unknown)


def is_large_body(raw_body: bytes) -> bool:
    """Return whether the body is parsed and rendered in a thread: it would delay other streams."""
    size = len(raw_body)
    if size > INLINE_BYTES:
        return True
    if size > _WORDLESS_BYTES:
        num_blanks = raw_body[::_SAMPLED].count(b" ") * _SAMPLED
        if num_blanks * _BYTES_PER_BLANK < size:
            return True
    if size <= TURN_BYTES:
        return False
    # Most bodies have few braces. `find` skips text ten times as fast as `count` and the pattern.
    position = -1
    for _ in range(_MANY_OBJECTS):
        position = raw_body.find(b"{", position + 1)
        if position < 0:
            return False
    return len(_OBJECT.findall(raw_body)) > _MANY_OBJECTS
