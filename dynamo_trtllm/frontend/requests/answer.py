"""Hold the answer to one request: its choices, and what the client gets of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Protocol

from dynamo_trtllm.frontend.api.nvext import Extras
from dynamo_trtllm.frontend.api.response_schemas import ResponseMeta
from dynamo_trtllm.frontend.requests.choice import Choice, ChoiceDelta, Usage, share_suspicions
from dynamo_trtllm.frontend.requests.preprocess import B, GenerationPlan
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.errors import Cancelled, DynamoError
from dynamo_trtllm.protocol.messages import GenerateRequest
from dynamo_trtllm.support.http_server.exchange import HttpResponse


class AnswerBuilder(Protocol):
    """Encodes the answer to one request in the form of its API.

    A stream uses `start`, `delta`, `finish` and `error`, which return the bytes of events. An
    answer that is sent whole uses `push` and `body`.
    """

    def start(self) -> bytes:
        """Return the events before the first delta."""

    def delta(self, delta: ChoiceDelta, /) -> bytes:
        """Return the events of a delta."""

    def finish(self, usage: Usage, extras: Extras, /) -> bytes:
        """Return the events after the last delta."""

    def error(self, error: DynamoError, /) -> bytes:
        """Return the events that end a stream with an error."""

    def push(self, delta: ChoiceDelta, /) -> object:
        """Add a delta to the answer."""

    def body(self, usage: Usage, extras: Extras, /) -> dict[str, Any]:
        """Return the whole answer, after the last delta."""


class ApiAdapter(Protocol[B]):
    """One generating endpoint of the API.

    The implementations are `completions.CHAT`, `completions.TEXT`, `ResponsesAdapter` and
    `MessagesAdapter`; `http.app` gives each its route.
    """

    endpoint: str  # the value of the metric label `endpoint`
    id_prefix: str
    body: type[B]
    prompt_fields: frozenset[str]  # the body's fields that are not needed any more after planning
    ping: bytes  # the event that is sent in a silent stream; b"": a comment is sent

    async def resolve(
        self, body: B, served: ServedModel, call: GenerateRequest, owner: str
    ) -> tuple[Callable[[], GenerationPlan], int]:
        """Load the stored items that the request refers to, and return the work that plans it.

        Args:
            call: the call to workers, still without prompt and sampling values.
            owner: name of the API key, to which the stored responses belong; "": there are no keys.

        Returns:
            The function that plans the request, and the number of characters of stored text that it
            renders. The function may take long, is safe in a thread, and raises RequestError if the
            request is wrong or not supported.

        Raises:
            RequestError: the request refers to something that is not stored, or is too long.
        """

    def builder(self, meta: ResponseMeta, body: B, plan: GenerationPlan) -> AnswerBuilder:
        """Return the builder of the answer, for a stream or for a whole response."""

    async def on_complete(self, builder: Any, client: str) -> None:
        """Handle a complete response before its last part is sent.

        Args:
            builder: the builder that the method `builder` has returned.
            client: the client's network address; "" if unknown.
        """


class Answer:
    """The answer to one request, from its plan to its last byte.

    Args:
        answer_id: the id in the response, by which `explain` finds the request.
        builder: encodes or aggregates what the choices generate.
        plan: the plan of the request.
        is_streamed: the response is a stream of events.
        wants_stats: the client wants statistics in the response.
        nvext_fields: what the client wants in `nvext` of the response.
        ignored: names of ignored fields, for the response header; "" without any.
        on_complete: called once, before the last part of the answer is sent.
    """

    def __init__(
        self,
        answer_id: str,
        builder: AnswerBuilder,
        plan: GenerationPlan,
        *,
        is_streamed: bool,
        wants_stats: bool,
        nvext_fields: frozenset[str],
        ignored: str,
        on_complete: Callable[[], Awaitable[None]],
    ) -> None:
        self.id = answer_id
        self.builder = builder
        self.plan = plan
        self.is_streamed = is_streamed
        self.wants_stats = wants_stats
        self.nvext_fields = nvext_fields
        self.on_complete = on_complete
        self.choices: Sequence[Choice] = ()  # empty until `create_choices`
        self.has_begun = False  # the builder's first events were sent
        self._ignored = ignored

    def create_choices(self) -> None:
        """Create the choices.

        Call it after the wait for permits, because 128 choices take 0.5 MB.
        """
        self.choices = [
            Choice(choice_request, index) for index, choice_request in enumerate(self.plan.choices)
        ]
        # The deaths of workers are charged to all choices of a prompt together. Otherwise a prompt
        # that ends workers could end more of them with many choices.
        if len(self.choices) > 1:
            share_suspicions(self.choices, self.plan.candidates)

    def begin(self, response: HttpResponse) -> None:
        """Send what precedes the first delta. A ping may have sent the headers already."""
        self.has_begun = True
        if not response.started:
            response.start_events(self.headers())
        data = self.builder.start()
        if data:
            response.write(data)

    def headers(self) -> dict[str, str]:
        """Return response headers with the instances known by now and the ignored fields."""
        headers = {
            "x-prefill-instance": self.prefill_ids(),
            "x-decode-instance": self.decode_ids(),
            "x-dynamo-ignored-fields": self._ignored,
        }
        return {name: value for name, value in headers.items() if value}

    def usage(self) -> Usage:
        """Return the usage so far.

        A prompt counts once for all its candidates, with the cached tokens of the first candidate.
        """
        if len(self.choices) == 1:
            return self.choices[0].usage()
        by_choice = [choice.usage() for choice in self.choices]
        by_prompt = by_choice[:: self.plan.candidates]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in by_prompt),
            completion_tokens=sum(usage.completion_tokens for usage in by_choice),
            cached_tokens=sum(usage.cached_tokens for usage in by_prompt),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in by_choice),
        )

    def prefill_ids(self) -> str | None:
        """Return the prefill instances, see `joined_ids`."""
        return joined_ids(choice.timeline.prefill_instance for choice in self.choices)

    def decode_ids(self) -> str | None:
        """Return the decode instances, see `joined_ids`."""
        return joined_ids(choice.timeline.decode_instance for choice in self.choices)

    def finish_reasons(self) -> str:
        """Return the distinct finish reasons of the choices, joined by commas."""
        reasons = [choice.finish for choice in self.choices if choice.finish is not None]
        return ",".join(dict.fromkeys(reasons))


def joined_ids(instances: Iterable[int | None]) -> str | None:
    """Join distinct instance ids in hexadecimal; None if there are none."""
    ids = [f"{instance:x}" for instance in instances if instance is not None]
    return ",".join(dict.fromkeys(ids)) or None


def tokens_per_s(choices: Iterable[Choice]) -> float | None:
    """Return the sum of the rates of the choices; None if no choice has a rate, see `_rates`."""
    rates = _rates(choices)
    return sum(rates) if rates else None


def seconds_per_token(choices: Iterable[Choice]) -> float | None:
    """Return the time per token at the mean rate of the choices; None if no choice has a rate."""
    rates = _rates(choices)
    return len(rates) / sum(rates) if rates else None


def _rates(choices: Iterable[Choice]) -> list[float]:
    """Return the tokens per second after the first token, of each choice that has later tokens."""
    rates: list[float] = []
    for choice in choices:
        first_s = choice.timeline.first_s
        last_s = choice.timeline.last_s
        if first_s is not None and last_s > first_s:
            rates.append((choice.num_tokens - 1) / (last_s - first_s))
    return rates


class RunningAnswers:
    """The answers whose choices run, by their ids. Clients may look at answers and cancel them."""

    def __init__(self) -> None:
        self._by_id: dict[str, _RunningAnswer] = {}

    def track(self, answer: Answer, client: str, owner: str = "") -> _RunningAnswer:
        """Return a context manager. The answer is a running one while its `with` block runs.

        The block runs in the current task, which `cancel` cancels. If a client has cancelled the
        answer, the end of the block raises Cancelled.

        Args:
            answer: the answer.
            client: network address of its client.
            owner: name of the API key that it belongs to; "": there are no keys.
        """
        return _RunningAnswer(answer, client, owner, self._by_id)

    def builder(self, answer_id: str, owner: str) -> AnswerBuilder | None:
        """Return the builder of an answer in progress; None if `owner` has no such answer."""
        running = self._by_id.get(answer_id)
        if running is None or running.owner != owner:
            return None
        return running.answer.builder

    def cancel(self, answer_id: str) -> str:
        """Cancel an answer in progress. Return the network address of its client."""
        running = self._by_id[answer_id]
        running.cancel()
        return running.client


class _RunningAnswer:
    """An answer while its choices run in the current task."""

    def __init__(
        self, answer: Answer, client: str, owner: str, by_id: dict[str, _RunningAnswer]
    ) -> None:
        self.answer = answer
        self.client = client
        self.owner = owner
        self._by_id = by_id
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._num_cancels_before = 0  # how often the task was cancelled before the block
        self._is_cancelled = False  # a client has cancelled the answer

    def __enter__(self) -> None:
        self._by_id[self.answer.id] = self
        self._num_cancels_before = self._task.cancelling()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del self._by_id[self.answer.id]
        if not self._is_cancelled:
            return
        # The cancel ends here. The task goes on, so it no longer counts as cancelled, except if the
        # server or a timeout around the block has also cancelled it.
        num_cancels = self._task.uncancel()
        is_cancelled_by_others = num_cancels > self._num_cancels_before
        if isinstance(error, asyncio.CancelledError) and not is_cancelled_by_others:
            raise Cancelled(f"{self.answer.id} was cancelled on request") from None

    def cancel(self) -> None:
        """Cancel the task, on request of a client.

        A further call does nothing, so that it does not interrupt the end of the choices.
        """
        if not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()
