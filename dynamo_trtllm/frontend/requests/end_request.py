"""End a request in every case: report its error to the client, and its end to its timeline."""

from __future__ import annotations

import logging
from types import TracebackType

from dynamo_trtllm.errors import DynamoError, Overloaded
from dynamo_trtllm.frontend.requests.app_state import AppState
from dynamo_trtllm.frontend.requests.timeline import RequestTimeline
from dynamo_trtllm.http_server.errors import RETRY_AFTER_S
from dynamo_trtllm.http_server.exchange import ClientDisconnected, HttpResponse
from dynamo_trtllm.streams import unexpected_error

log = logging.getLogger(__name__)


class RequestEnding:
    """The end of a request, after the `with` block that serves it.

    An error of the block is sent to the client and not raised. ClientDisconnected and a
    cancellation are raised.
    """

    def __init__(self, timeline: RequestTimeline, response: HttpResponse, state: AppState) -> None:
        self._timeline = timeline
        self._response = response
        self._state = state

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        outcome: str | DynamoError = "cancelled"
        try:
            if error is None:
                outcome = "ok"
            elif isinstance(error, MemoryError):
                outcome = self._out_of_memory()
                await self._send(outcome)
            elif isinstance(error, Exception) and not isinstance(error, ClientDisconnected):
                outcome = self._reported(error)
                # Thousands of requests may fail at once.
                async with self._state.turns.ending.turn():
                    await self._send(outcome)
            else:
                return False
        finally:
            self._timeline.ended(outcome, self._response.status)
        return True

    def _out_of_memory(self) -> DynamoError:
        # A traceback would take more memory.
        log.error(
            "request %s failed: out of memory; lower --max-total-body-bytes",
            self._timeline.facts.id,
        )
        return Overloaded(
            "the server is out of memory for this request; try again later or send a shorter one"
        )

    def _reported(self, error: Exception) -> DynamoError:
        """Return the error for the client. Any other error than ours is a bug, which is logged."""
        if isinstance(error, DynamoError):
            return error
        return unexpected_error(error, self._timeline.facts.id)

    async def _send(self, error: DynamoError) -> None:
        """Send the error as HTTP status or as the last event of a started stream.

        After the end of the response, log it.
        """
        response = self._response
        answer = self._timeline.answer
        if response.ended:
            log.info("a request failed after its complete response: %s", error)
        elif answer is not None and answer.is_streamed and response.started:
            await response.send_events(answer.builder.error(error), last=True)
        elif isinstance(error, Overloaded):
            response.send_error(error, self._state.limits.choices.retry_after_s())
        else:
            response.send_error(error, RETRY_AFTER_S)
