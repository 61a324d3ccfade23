"""Write the table in docs/reference-rejected-fields.md.

`python -m scripts.rejected_fields_reference` runs it. A test compares the page with this output.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from dynamo_trtllm.frontend.api.chat import (
    AssistantMessage,
    ChatRequest,
    JsonSchema,
)
from dynamo_trtllm.frontend.api.completions import CompletionRequest
from dynamo_trtllm.frontend.api.messages import MessagesRequest
from dynamo_trtllm.frontend.api.request_model import RequestModel
from dynamo_trtllm.frontend.api.responses import ResponseRequest, TextFormat
from dynamo_trtllm.frontend.api.sampling import NvExt
from scripts.config_reference import table

PAGE = Path(__file__).parents[1] / "docs" / "reference-rejected-fields.md"
_ENDPOINTS = 4
PLACES: dict[str, tuple[type[RequestModel], str]] = {
    "chat": (ChatRequest, ""),
    "completions": (CompletionRequest, ""),
    "responses": (ResponseRequest, ""),
    "messages": (MessagesRequest, ""),
    "assistant messages": (AssistantMessage, "messages[]."),
    "schemas of chat": (JsonSchema, "response_format.json_schema."),
    "formats of responses": (TextFormat, "text.format."),
    "all": (NvExt, "nvext."),
}


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield the name of each rejected field, where it is rejected, and what to send instead."""
    places: dict[tuple[str, str], list[str]] = {}
    for place, (model, prefix) in PLACES.items():
        for name, reason in model.unsupported.items():
            places.setdefault((prefix + name, reason), []).append(place)
    for (name, reason), names_of_places in sorted(places.items()):
        where = "all" if len(names_of_places) == _ENDPOINTS else ", ".join(names_of_places)
        yield f"`{name}`", where, reason


def page() -> str:
    """Return the page with the table in its marked place."""
    written = table(("field", "of", "reason, or what to send instead"), list(rows()))
    text = PAGE.read_text(encoding="utf-8")

    def with_table(found: re.Match[str]) -> str:
        return f"{found[1]}\n{written}{found[2]}"

    return re.sub(r"(?s)(<!-- rejected-fields -->).*?(<!-- / -->)", with_table, text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
