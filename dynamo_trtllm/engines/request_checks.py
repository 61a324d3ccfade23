"""What engines over another library make of a request alike: what they refuse, where it stops, guided forms. Pure.

The forms follow xgrammar's documentation, which both TensorRT-LLM and vLLM use.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from dynamo_trtllm.errors import RequestRejected
from dynamo_trtllm.messages import GenerateRequest, OutputFormat, Phase, Role, Sampling, StructuredOutput

# Harmony's ends of a turn: <|return|> and <|call|>. The libraries stop at neither, or at one, of their own accord.
HARMONY_STOP_IDS = (200002, 200012)
_DEFAULTS = Sampling(max_tokens=1)


def check(
    request: GenerateRequest, *, role: Role, vocab_size: int, unsupported_features: Iterable[str], library: str
) -> None:
    """Raises RequestRejected naming the field. `unsupported_features`: fields of Sampling, and "cache_salt"."""
    if not request.token_ids:
        raise RequestRejected("the prompt is empty", field="token_ids")
    if (largest := max(request.token_ids)) >= vocab_size:
        raise RequestRejected(f"token id {largest} is not in the vocabulary of {vocab_size}", field="token_ids")
    if request.phase is not Phase.AGGREGATED and role is Role.AGGREGATED:
        raise RequestRejected(f"this worker is aggregated and serves no {request.phase} calls", field="phase")
    for name in unsupported_features:
        if _is_used(request, name):
            raise RequestRejected(
                f"{name} is not supported by this worker's {library}; leave it out, or see its log for the reason",
                field=name,
            )


def _is_used(request: GenerateRequest, name: str) -> bool:
    if name == "cache_salt":
        return request.cache_salt is not None
    return bool(getattr(request.sampling, name) != getattr(_DEFAULTS, name))


def stop_token_ids(sampling: Sampling, own: Iterable[int]) -> frozenset[int]:
    """`ignore_eos` goes on past the model's own stop tokens, also where the request names them; others still stop."""
    ends, named = set(own), set(sampling.stop_token_ids)
    return frozenset(named - ends if sampling.ignore_eos else named | ends)


def is_plain(guided: StructuredOutput) -> bool:
    """Whether it is one JSON Schema for the whole answer."""
    return len(guided.alternatives) == 1 and not guided.alternatives[0].prefix and not guided.trigger


def guided_params(guided: StructuredOutput) -> dict[str, Any]:
    """Arguments of the library's class for guided decoding, whose names are the same in both."""
    if is_plain(guided):
        schema = guided.alternatives[0].json_schema
        return {"json_object": True} if schema == "{}" else {"json": schema}
    return {"structural_tag": _structural_tag(guided)}


def _structural_tag(guided: StructuredOutput) -> str:
    """The form as the JSON text of a structural tag."""
    form = _triggered_tags(guided) if guided.trigger else _one_of([_written(each) for each in guided.alternatives])
    return json.dumps({"type": "structural_tag", "format": form})


def _triggered_tags(guided: StructuredOutput) -> dict[str, Any]:
    """Free text up to `trigger`, then one of the forms, then nothing more."""
    tags = [
        {"begin": guided.trigger + each.prefix, "content": _schema(each), "end": ""} for each in guided.alternatives
    ]
    return {"type": "triggered_tags", "triggers": [guided.trigger], "tags": tags, "stop_after_first": True}


def _written(alternative: OutputFormat) -> dict[str, Any]:
    if not alternative.prefix:
        return _schema(alternative)
    prefix = {"type": "const_string", "value": alternative.prefix}
    return {"type": "sequence", "elements": [prefix, _schema(alternative)]}


def _schema(alternative: OutputFormat) -> dict[str, Any]:
    schema = {"type": "object"} if alternative.json_schema == "{}" else json.loads(alternative.json_schema)
    return {"type": "json_schema", "json_schema": schema}


def _one_of(forms: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return forms[0] if len(forms) == 1 else {"type": "or", "elements": list(forms)}
