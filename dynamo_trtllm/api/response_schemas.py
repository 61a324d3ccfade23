"""JSON Schemas of what we answer, by name, for `/openapi.json`. A test holds the answers to them."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

Schema: TypeAlias = dict[str, Any]

TEXT: Final[Schema] = {"type": "string"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
NUMBER: Final[Schema] = {"type": "number"}
TIME: Final[Schema] = {"type": "integer", "minimum": 0, "description": "Seconds since the epoch."}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _obj(fields: dict[str, Schema], optional: dict[str, Schema] | None = None, about: str = "") -> Schema:
    """No other fields than these."""
    schema: Schema = {
        "type": "object",
        "properties": fields | (optional or {}),
        "required": list(fields),
        "additionalProperties": False,
    }
    return schema | {"description": about} if about else schema


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _one(*values: str) -> Schema:
    return {"enum": list(values)}


_FINISH = _one("stop", "length", "tool_calls")
_TEXT_FINISH = _one("stop", "length")
_STATS = {"dynamo_trtllm": ref("Stats")}

_TOKEN = {"token": TEXT, "logprob": NUMBER, "bytes": _null(_list({"type": "integer", "minimum": 0, "maximum": 255}))}
_CALLED = _obj({"name": TEXT, "arguments": {"type": "string", "description": "JSON, as the model wrote it."}})
_REASONING = {"type": "string", "description": "What the model thought before it answered; not of OpenAI's API."}
_STATUS = _one("in_progress", "completed", "incomplete", "failed", "cancelled")

_BASICS: dict[str, Schema] = {
    "Error": _obj(
        {
            "error": _obj(
                {
                    "message": {"type": "string", "description": "Says what to change."},
                    "type": _one(
                        "invalid_request_error", "rate_limit_error", "service_unavailable_error", "server_error"
                    ),
                    "param": {"type": ["string", "null"], "description": "The field at fault, if one is."},
                    "code": {"type": "string", "description": "Stable; see docs/api.md for all."},
                }
            )
        },
        about="Every error answer.",
    ),
    "Model": _obj(
        {
            "id": TEXT,
            "object": {"const": "model"},
            "created": TIME,
            "owned_by": TEXT,
            "max_model_len": COUNT | {"description": "Prompt and output tokens together."},
        }
    ),
    "ModelList": _obj({"object": {"const": "list"}, "data": _list(ref("Model"))}),
    "Ready": _obj({"model": TEXT, "status": _one("ready", "not_ready")}, {"message": TEXT}),
    "FrontendReady": _obj({"status": _one("ready", "loading", "not_ready"), "reason": TEXT}),
    "Live": _obj({"status": {"const": "live"}}),
    "Health": _obj(
        {
            "status": _one("healthy", "not_ready"),
            "endpoints": _list(TEXT),
            "instances": _list(
                _obj(
                    {
                        "component": TEXT,
                        "endpoint": TEXT,
                        "namespace": TEXT,
                        "instance_id": COUNT,
                        "id": TEXT | {"description": "The same in hexadecimal, as in logs, headers and pairs."},
                        "role": TEXT,
                        "model": TEXT,
                        "engine": TEXT,
                        "transport": _obj({"nats_tcp": TEXT}),
                    }
                )
            ),
            "pairs": _list(ref("Pair")) | {"description": "Whether KV was seen to move, by requests or canaries."},
            "mismatched": _list(TEXT) | {"description": "Instances that fit none of the other role, and why."},
            "rejected_records": _list(_obj({"key": TEXT, "reason": TEXT}))
            | {"description": "Rejected etcd records and the reasons; at most 100. Keys are escaped."},
        },
        {"message": TEXT},
        "Of the deployment; the process itself is well when this is answered.",
    ),
    "Pair": _obj(
        {
            "model": TEXT,
            "prefill": {"type": ["string", "null"], "description": "null: the instance does whole requests."},
            "decode": TEXT,
            "state": _one("untried", "working", "failing", "quarantined"),
            "reason": TEXT,
            "age_s": _null(NUMBER) | {"description": "Since the last outcome."},
        }
    ),
    "Usage": _obj(
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": _obj({"cached_tokens": COUNT}),
            "completion_tokens_details": _obj({"reasoning_tokens": COUNT}),
        }
    ),
    "Stats": _obj(
        {
            "prefill_instance": {"type": ["string", "null"]},
            "decode_instance": {"type": ["string", "null"]},
            "kv_bytes": COUNT,
            "transport": TEXT,
            "queued_s": NUMBER,
            "ttft_s": NUMBER,
            "tokens_per_s": _null(NUMBER),
            "phase_s": _obj({"queue": NUMBER, "prefill": NUMBER, "handoff": NUMBER, "decode_wait": NUMBER}),
        },
        {"choices": _list(ref("Stats"))},
        "With the header x-dynamo-stats: 1.",
    ),
}

_CHAT: dict[str, Schema] = {
    "ToolCall": _obj({"id": TEXT, "type": {"const": "function"}, "function": _CALLED}),
    "ToolCallDelta": _obj(
        {"index": COUNT, "function": _obj({"arguments": TEXT}, {"name": TEXT})},
        {"id": TEXT, "type": {"const": "function"}},
        "The first of a call has its id, type and name.",
    ),
    "ChatLogprobs": _obj(
        {"content": _list(_obj(_TOKEN | {"top_logprobs": _list(_obj(_TOKEN))})), "refusal": {"type": "null"}}
    ),
    "ChatCompletion": _obj(
        {
            "id": TEXT,
            "object": {"const": "chat.completion"},
            "created": TIME,
            "model": TEXT,
            "choices": _list(
                _obj(
                    {
                        "index": COUNT,
                        "message": _obj(
                            {"role": {"const": "assistant"}, "content": _null(TEXT), "refusal": {"type": "null"}},
                            {"reasoning_content": _REASONING, "tool_calls": _list(ref("ToolCall"))},
                        ),
                        "logprobs": _null(ref("ChatLogprobs")),
                        "finish_reason": _FINISH,
                    }
                )
            ),
            "usage": ref("Usage"),
        },
        _STATS,
    ),
    "ChatCompletionChunk": _obj(
        {
            "id": TEXT,
            "object": {"const": "chat.completion.chunk"},
            "created": TIME,
            "model": TEXT,
            "choices": _list(
                _obj(
                    {
                        "index": COUNT,
                        "delta": _obj(
                            {},
                            {
                                "role": {"const": "assistant"},
                                "content": TEXT,
                                "refusal": {"type": "null"},
                                "reasoning_content": _REASONING,
                                "tool_calls": _list(ref("ToolCallDelta")),
                            },
                        ),
                        "logprobs": _null(ref("ChatLogprobs")),
                        "finish_reason": _null(_FINISH),
                    }
                )
            ),
        },
        {"usage": _null(ref("Usage"))} | _STATS,
        "One event of a stream; an Error may take its place. The last data is [DONE].",
    ),
}

_COMPLETIONS: dict[str, Schema] = {
    "TextLogprobs": _obj(
        {
            "tokens": _list(TEXT),
            "token_logprobs": _list(NUMBER),
            "top_logprobs": _list({"type": "object", "additionalProperties": NUMBER}),
            "text_offset": _list(COUNT),
        }
    ),
    "TextCompletion": _obj(
        {
            "id": TEXT,
            "object": {"const": "text_completion"},
            "created": TIME,
            "model": TEXT,
            "choices": _list(
                _obj(
                    {
                        "index": COUNT,
                        "text": TEXT,
                        "logprobs": _null(ref("TextLogprobs")),
                        "finish_reason": _null(_TEXT_FINISH) | {"description": "null only in a stream, until the end"},
                    }
                )
            ),
        },
        {"usage": _null(ref("Usage"))} | _STATS,
        "A whole answer, which always has its usage, or one event of a stream.",
    ),
}

_RESPONSES: dict[str, Schema] = {
    "Response": {
        "type": "object",
        "description": "OpenAI's Response object; the request's fields come back in it.",
        "properties": {
            "id": TEXT,
            "object": {"const": "response"},
            "created_at": TIME,
            "model": TEXT,
            "status": _STATUS,
            "output": _list({"type": "object"}),
            "error": {"type": ["object", "null"]},
            "incomplete_details": {"type": ["object", "null"]},
            "usage": {"type": ["object", "null"]},
        }
        | _STATS,
        "required": ["id", "object", "created_at", "model", "status", "output"],
    },
    "ResponseEvent": {
        "type": "object",
        "description": "One event of a stream, numbered; it ends with the event of the response's end.",
        "properties": {"type": TEXT, "sequence_number": COUNT},
        "required": ["type", "sequence_number"],
    },
    "ResponseItems": _obj(
        {
            "object": {"const": "list"},
            "data": _list({"type": "object"}),
            "first_id": TEXT,
            "last_id": TEXT,
            "has_more": {"type": "boolean"},
        }
    ),
    "ResponseDeleted": _obj({"id": TEXT, "object": {"const": "response"}, "deleted": {"const": True}}),
}

ANSWERS: Final = _BASICS | _CHAT | _COMPLETIONS | _RESPONSES
