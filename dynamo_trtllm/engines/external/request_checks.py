"""Convert stop tokens and structured output for engines that wrap a library.

Structural tags follow the format of xgrammar's documentation, which TensorRT-LLM and vLLM both use.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dynamo_trtllm.engines.checkpoint import Checkpoint
from dynamo_trtllm.messages import OutputFormat, StructuredOutput

# Harmony's stop tokens <|return|> and <|call|>. By default the libraries stop at one of them or at neither.
_HARMONY_STOP_IDS = (200002, 200012)


def end_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the model's own stop tokens, the main one first."""
    harmony = _HARMONY_STOP_IDS if checkpoint.renderer == "harmony" else ()
    return tuple(dict.fromkeys(each for each in (*harmony, *checkpoint.eos_token_ids) if each < checkpoint.vocab_size))


def is_plain(guided: StructuredOutput) -> bool:
    """Return True if one format covers the complete output."""
    return len(guided.alternatives) == 1 and not guided.alternatives[0].prefix and not guided.trigger


def guided_params(guided: StructuredOutput) -> dict[str, Any]:
    """Return the arguments of the class for guided decoding, which are the same in TensorRT-LLM and vLLM."""
    if is_plain(guided):
        only = guided.alternatives[0]
        if only.grammar:
            return {"grammar": only.grammar}
        if only.regex:
            return {"regex": only.regex}
        return {"json_object": True} if only.json_schema == "{}" else {"json": only.json_schema}
    return {"structural_tag": _structural_tag(guided)}


def _structural_tag(guided: StructuredOutput) -> str:
    """Return the JSON text of a structural tag."""
    form = _triggered_tags(guided) if guided.trigger else _one_of([_format(each) for each in guided.alternatives])
    return json.dumps({"type": "structural_tag", "format": form})


def _triggered_tags(guided: StructuredOutput) -> dict[str, Any]:
    """Return a format of free text up to `trigger`, followed by exactly one of the alternatives."""
    tags = [
        {"begin": guided.trigger + each.prefix, "content": _content(each), "end": ""} for each in guided.alternatives
    ]
    return {"type": "triggered_tags", "triggers": [guided.trigger], "tags": tags, "stop_after_first": True}


def _format(alternative: OutputFormat) -> dict[str, Any]:
    if not alternative.prefix:
        return _content(alternative)
    prefix = {"type": "const_string", "value": alternative.prefix}
    return {"type": "sequence", "elements": [prefix, _content(alternative)]}


def _content(alternative: OutputFormat) -> dict[str, Any]:
    if alternative.grammar:
        return {"type": "grammar", "grammar": alternative.grammar}
    if alternative.regex:
        return {"type": "regex", "pattern": alternative.regex}
    schema = {"type": "object"} if alternative.json_schema == "{}" else json.loads(alternative.json_schema)
    return {"type": "json_schema", "json_schema": schema}


def _one_of(forms: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return forms[0] if len(forms) == 1 else {"type": "or", "elements": list(forms)}
