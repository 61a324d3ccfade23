"""Serve one generating endpoint: admit, read the body, run the request, and answer in every case."""

from __future__ import annotations

import logging
import secrets
from typing import Generic

from dynamo_trtllm.errors import DynamoError, Overloaded
from dynamo_trtllm.frontend.generation.api_adapter import ApiAdapter, B
from dynamo_trtllm.frontend.http.request_handler import AppState, RequestHandler
from dynamo_trtllm.frontend.http.request_metrics import RequestMetrics
from dynamo_trtllm.frontend.http.requests import check_json, read_body
from dynamo_trtllm.http_server.errors import internal
from dynamo_trtllm.http_server.exchange import ClientDisconnected, HttpRequest, HttpResponse

log = logging.getLogger(__name__)


class GenerateEndpoint(Generic[B]):
    """The handler of one API adapter's requests."""

    def __init__(self, adapter: ApiAdapter[B], app_state: AppState) -> None:
        self._adapter = adapter
        self._app_state = app_state

    async def __call__(self, request: HttpRequest, response: HttpResponse) -> None:
        """Answer the request in every case. A disconnect cancels this task. Raises ClientDisconnected."""
        response.cancel_on_disconnect()
        metrics, engine_id = self._app_state.metrics, _engine_id(request)
        wants_stats = request.header(b"x-dynamo-stats") == "1"
        request_metrics = RequestMetrics(
            metrics, self._adapter.endpoint, engine_id, path=request.path, wants_stats=wants_stats
        )
        handler = RequestHandler(self._adapter, self._app_state, response, request_metrics)
        metrics.request_started()
        outcome: str | DynamoError = "cancelled"
        try:
            await self._run(handler, request, engine_id)
            outcome = "ok"
        except DynamoError as error:
            outcome = error
            await handler.fail(error)
        except MemoryError:
            # A traceback would take more memory.
            log.error("request %s failed: out of memory; lower --max-total-body-bytes", engine_id)
            outcome = Overloaded("the server is out of memory for this request; try again later or send a shorter one")
            await handler.fail(outcome)
        except ClientDisconnected:
            raise
        except Exception:  # any bug: logged here, answered as `internal`
            log.exception("request %s failed", engine_id)
            outcome = internal()
            await handler.fail(outcome)
        finally:
            handler.release()
            request_metrics.write(outcome, response.status)
            # An error refers to this frame. If the frame also referred to it, the cycle would keep the body in memory.
            del outcome

    async def _run(self, handler: RequestHandler[B], request: HttpRequest, engine_id: str) -> None:
        handler.admit()
        check_json(request)
        config = self._app_state.config
        handler.raw_body = await read_body(
            request, config.max_body_bytes, config.receive_timeout_s, handler.reserve_bytes
        )
        await handler.serve(engine_id, request.client)


def _engine_id(request: HttpRequest) -> str:
    """Return a request id that starts with the client's id and is unique even if clients repeat theirs."""
    unique = secrets.token_hex(8)
    return f"{request.id}-{unique}" if request.id else unique
