"""Serve one generating endpoint as an ASGI app: admit, read the body, run the request, and answer in every case."""

from __future__ import annotations

import logging
import secrets
from typing import Any, Generic

from starlette.types import Receive, Scope, Send

from dynamo_trtllm.errors import DynamoError, Overloaded
from dynamo_trtllm.frontend.generation.api_adapter import ApiAdapter, B
from dynamo_trtllm.frontend.http import (
    ClientDisconnected,
    ClientResponse,
    check_json,
    header,
    internal,
    read_body,
    run_until_disconnect,
)
from dynamo_trtllm.frontend.request_handler import AppState, RequestHandler
from dynamo_trtllm.frontend.request_metrics import RequestMetrics
from dynamo_trtllm.http_server.body_writer import WRITER

log = logging.getLogger(__name__)


class GenerateEndpoint(Generic[B]):
    """The ASGI app of one API adapter."""

    def __init__(self, adapter: ApiAdapter[B], app_state: AppState) -> None:
        self._adapter = adapter
        self._app_state = app_state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics, engine_id = self._app_state.metrics, _engine_id(scope)
        wants_stats = header(scope, b"x-dynamo-stats") == "1"
        request_metrics = RequestMetrics(
            metrics, self._adapter.endpoint, engine_id, path=str(scope.get("path", "")), wants_stats=wants_stats
        )
        response = ClientResponse(send, scope.get("state", {}).get(WRITER))
        handler = RequestHandler(self._adapter, self._app_state, response, request_metrics)
        metrics.request_started()
        outcome: str | DynamoError = "cancelled"
        try:
            outcome = await self._run(handler, scope, receive, engine_id)
        finally:
            handler.release()
            request_metrics.write(outcome, response.status)

    async def _run(
        self, handler: RequestHandler[B], scope: Scope, receive: Receive, engine_id: str
    ) -> str | DynamoError:
        """Answer the request in every case. Return the outcome: "ok", "cancelled" or the error."""
        try:
            handler.admit()
            check_json(scope)
            config = self._app_state.config
            handler.raw_body = await read_body(
                scope, receive, config.max_body_bytes, config.receive_timeout_s, handler.reserve_bytes
            )
            await run_until_disconnect(handler.serve(engine_id, _client(scope)), receive, handler.is_answered)
        except ClientDisconnected:
            return "cancelled"
        except DynamoError as error:
            await handler.fail(error)
            return error
        except MemoryError:
            # A traceback would take more memory.
            log.error("request %s failed: out of memory; lower --max-total-body-bytes", engine_id)
            failure = Overloaded("the server is out of memory for this request; try again later or send a shorter one")
            await handler.fail(failure)
            return failure
        except Exception:  # any bug: logged here, answered as `internal`
            log.exception("request %s failed", engine_id)
            bug = internal()
            await handler.fail(bug)
            return bug
        return "ok"


def _client(scope: Scope) -> str:
    address: tuple[str, int] | None = scope.get("client")
    return address[0] if address is not None else ""


def _engine_id(scope: Scope) -> str:
    """Return a request id that starts with the client's id and is unique even if clients repeat theirs."""
    given: Any = scope.get("state", {}).get("request_id", "")
    unique = secrets.token_hex(8)
    return f"{given}-{unique}" if given else unique
