"""Build the bodies of errors in the forms of OpenAI's APIs and of Anthropic's Messages API.

The status decides the error's type in each API.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dynamo_trtllm.frontend.api.response_schemas import (
    ErrorType,
    MessagesErrorObject,
    MessagesErrorType,
    error_body,
    messages_error_body,
)
from dynamo_trtllm.protocol.errors import ContextTooLong, UnsupportedParameter

INVALID: Final = "invalid_request_error"
_OTHER_TYPES: Final[dict[int, ErrorType]] = {
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def openai_error(
    status: int, message: str, *, param: str | None = None, code: str, request_id: str
) -> Mapping[str, Any]:
    """Return an error in the form of OpenAI's API, which has no request id."""
    usual_type: ErrorType = INVALID if status < 500 else "server_error"
    error_type = _OTHER_TYPES.get(status, usual_type)
    return error_body(message, type=error_type, param=param, code=code)


_MESSAGES_TYPES: Final[dict[int, MessagesErrorType]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_error(
    status: int, message: str, *, param: str | None = None, code: str, request_id: str
) -> MessagesErrorObject:
    """Return an error in the form of Anthropic's Messages API."""
    usual_type: MessagesErrorType = INVALID if status < 500 else "api_error"
    error_type = _MESSAGES_TYPES.get(status, usual_type)
    if code == ContextTooLong.code:
        message = f"prompt is too long: {message}"  # Claude Code then compacts the conversation
    body = messages_error_body(
        message,
        type=error_type,
        param=param,
        code=code,
        request_id=request_id,
    )
    if param == "thread" and code == UnsupportedParameter.code:
        # The tool runners of Anthropic's clients send `thread` on their own. By these details they
        # know that they have to send all messages instead (anthropic 2.14).
        body["error"]["details"] = {
            "error_code": "thread_unsupported_request",
            "unsupported": ["thread"],
        }
    return body
