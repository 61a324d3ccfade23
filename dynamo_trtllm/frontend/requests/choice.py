"""Run one choice of a response: convert its chunks to deltas for the client.

A choice looks for stop strings, decides on the finish reason, and counts tokens. This module knows
neither HTTP nor JSON.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from dynamo_trtllm.frontend.requests.logprobs import HALF_CHARACTER
from dynamo_trtllm.frontend.requests.preprocess import ChoiceRequest, GenerationPlan
from dynamo_trtllm.frontend.requests.stop_strings import StopStrings
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.frontend.routing.suspects import Suspicion
from dynamo_trtllm.frontend.tokenization.output import Channel, Delta, StepOutput, joined
from dynamo_trtllm.protocol.errors import DynamoError, StreamIncomplete
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    PhaseTimings,
    TokenIds,
    TokenLogprob,
    token_ids,
)
from dynamo_trtllm.protocol.streams import StreamEvent, StreamHandle, unexpected_error

NO_LOGPROBS: tuple[TokenLogprob, ...] = ()
_REASONING = Channel.REASONING
_CALL = Channel.CALL
_ANSWER = (Channel.FINAL, Channel.CONTENT)
# Limit of the suspicions of one request, and so of the pairs of workers that run its choices.
MAX_SUSPICIONS: Final = 2


class ChoiceDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The output that one engine step adds to one choice.

    Only the last delta of a choice has `finish`.

    It is a msgspec struct because a delta is created per token, and to create a frozen dataclass
    takes ten times as long.
    """

    index: int = 0  # the index of the choice
    tokens: int = 0  # number of generated tokens, including those that are not shown
    deltas: tuple[Delta, ...] = ()  # parsed deltas, in the order of generation
    token_ids: Sequence[int] = ()  # the ids of all tokens, if the client asked for them
    finish: str | None = None  # "stop", "length", "tool_calls"
    stop: str | None = None  # the stop string that ended the output, with `finish`
    # Only in the first delta of a choice, if the client asked for them.
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class KvTransferStats(NamedTuple):
    """How the KV of a choice was transferred."""

    num_bytes: int
    backend: str


class Choice:
    """One choice of a request: its stream, parser, timeline and finish reason.

    It exists until the request has ended.
    """

    def __init__(self, choice_request: ChoiceRequest, index: int = 0) -> None:
        self._choice_request = choice_request
        parser = choice_request.make_parser()
        self._parse = parser.push
        self._finish_parser = parser.finish
        self._index = index
        # The engine returns log-probabilities. They may be only for `best_of`, and not for clients.
        self._has_logprobs = choice_request.request.sampling.logprobs is not None
        self._shows_logprobs = self._has_logprobs and choice_request.shows_logprobs
        self._logprob_sum = 0.0
        self._options = choice_request.options
        self._stops = StopStrings(self._options.stop) if self._options.stop else None
        self._reasoning_tokens = 0
        self._saw_tool_call = False
        self._in_content = False  # the last text was shown as content
        self._text_channel = Channel.CONTENT  # the channel of the text so far
        self._is_plain = choice_request.is_plain
        # A stop string or a second tool call may end the output within a step. To find the token
        # that ended it, all tokens of earlier steps are needed.
        self._may_end_within_step = self._stops is not None or not self._options.parallel_tool_calls
        self._earlier_ids = token_ids()
        # The client wants an answer in a format, and the output has no text of the answer yet.
        self._awaits_answer = self._options.output_format is not None
        self._awaits_prompt_logprobs = choice_request.request.sampling.prompt_logprobs is not None
        self._stream: StreamHandle | None = None
        self.num_tokens = 0  # how many tokens were generated
        self.finish: str | None = None
        self.timeline = ChoiceTimeline()

    def start(
        self, router: RequestRouter, on_delta: Callable[[ChoiceDelta | DynamoError], None]
    ) -> None:
        """Start the stream.

        `on_delta` gets the deltas of the stream. The stream ends with a delta that has `finish`, or
        with an error. After that, `on_delta` is not called any more.
        """
        push = self.push
        request = self._choice_request.request

        def on_event(event: StreamEvent) -> None:
            if not isinstance(event, Chunk):
                on_delta(self._with_api_name(event))
                return
            try:
                delta = push(event)
                if delta.finish is not None and event.finish_reason is None:
                    # The output ends here, but the engine does not know that.
                    self.cancel()
                on_delta(delta)
            except Exception as exc:  # noqa: BLE001 - a bug, or a stream without its end
                self.cancel()
                if isinstance(exc, DynamoError):
                    on_delta(exc)
                else:
                    on_delta(unexpected_error(exc, request.request_id))

        self._stream = router.generate(request, self.timeline, on_event)

    @property
    def is_running(self) -> bool:
        """True if the stream was started, and has neither finished nor been cancelled.

        It stays True after an error; to cancel such a stream does no harm.
        """
        return self._stream is not None and self.finish is None

    @property
    def request_id(self) -> str:
        """Return the id of this choice's calls."""
        return self._choice_request.request.request_id

    def prompt_bytes(self) -> bytes:
        """Return the token ids of the prompt, as bytes."""
        return self._choice_request.request.token_ids.tobytes()

    def _with_api_name(self, error: DynamoError) -> DynamoError:
        """Return an error of the engine with the API's name of the field that it rejected."""
        name = self._choice_request.names.get(error.field or "")
        if name is None:
            return error
        named = type(error)(f"{name}: {error.message}", field=name)
        named.__cause__ = error
        return named

    def cancel(self) -> None:
        """End the stream, if it runs."""
        stream = self._stream
        self._stream = None
        if stream is not None:
            stream.cancel()

    def push(self, chunk: Chunk) -> ChoiceDelta:
        """Return the delta of one chunk."""
        # The fast path of nearly all tokens: only parsing.
        if chunk.finish_reason is None and self._is_plain:
            tokens = len(chunk.token_ids)
            self.num_tokens += tokens
            step = self._parse(chunk.token_ids)
            self._reasoning_tokens += step.reasoning_tokens
            if step.num_calls:
                self._saw_tool_call = True
            return ChoiceDelta(index=self._index, tokens=tokens, deltas=step.deltas)
        deltas: list[Delta] = []
        prompt_logprobs = NO_LOGPROBS
        if self._awaits_prompt_logprobs:
            prompt_logprobs = self._take_prompt_logprobs(deltas)
        if self._choice_request.is_prompt_only:
            self.finish = "length"
            return ChoiceDelta(
                index=self._index,
                deltas=tuple(deltas),
                finish="length",
                prompt_logprobs=prompt_logprobs,
            )
        ids = self._push_shown(chunk, deltas)
        self.num_tokens += len(ids)
        if self._has_logprobs:
            self._logprob_sum += sum(token.logprob for token in chunk.logprobs[: len(ids)])
        if self.finish is None and chunk.finish_reason is not None:
            self._end(chunk.finish_reason, deltas)
        return ChoiceDelta(
            index=self._index,
            tokens=len(ids),
            deltas=joined(deltas),
            token_ids=ids if self._options.returns_token_ids else (),
            finish=self.finish,
            stop=None if self._stops is None else self._stops.found,
            prompt_logprobs=prompt_logprobs,
        )

    @property
    def mean_logprob(self) -> float:
        """The mean over all tokens so far, reasoning and markers included.

        `best_of` ranks by it.
        """
        return self._logprob_sum / max(1, self.num_tokens)

    @property
    def kv_transfer(self) -> KvTransferStats:
        """The KV transfer of the choice, as far as its workers have reported it."""
        prefill = self.timeline.prefill_stats or PhaseTimings()
        decode = self.timeline.decode_stats or PhaseTimings()
        kv_bytes = decode.kv_bytes if decode.kv_bytes else prefill.kv_bytes
        return KvTransferStats(kv_bytes, decode.transport or prefill.transport)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part of a phase, such as `queue.slots`, as far as the workers report them."""
        sums: dict[str, float] = {}
        for stats in (self.timeline.prefill_stats, self.timeline.decode_stats):
            if stats is None:
                continue
            for name, seconds in stats.more.items():
                if "." in name:
                    sums[name] = sums.get(name, 0.0) + seconds
        return sums

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that a worker had in its prefix cache, as far as known by now."""
        stats = self.timeline.prefill_stats or self.timeline.decode_stats
        if stats is None:
            return 0
        # After a migration the engine counts output tokens, too: they are part of the new worker's
        # prompt.
        return min(stats.cached_tokens, len(self._choice_request.request.token_ids))

    def usage(self) -> Usage:
        """Return the usage so far."""
        return Usage(
            prompt_tokens=len(self._choice_request.request.token_ids),
            completion_tokens=self.num_tokens,
            cached_tokens=self.cached_tokens,
            reasoning_tokens=self._reasoning_tokens,
        )

    def _take_prompt_logprobs(self, deltas: list[Delta]) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of the prompt for the field `prompt_logprobs`.

        With `echo`, the prompt is part of the text. Then, add a delta with its log-probabilities.

        Call this once, with the first chunk: all log-probabilities of the prompt arrive before it.
        """
        self._awaits_prompt_logprobs = False
        choice_request = self._choice_request
        logprobs = self.timeline.prompt_logprobs
        num_prompt = len(choice_request.request.token_ids)
        if len(logprobs) != num_prompt:
            raise StreamIncomplete(
                f"the worker returned log-probabilities of {len(logprobs)} of {num_prompt} prompt"
                " tokens; upgrade it"
            )
        echoed = _with_alternatives(logprobs, choice_request.echo_logprobs)
        if echoed:
            deltas.append(Delta(channel=self._text_channel, logprobs=echoed))
        return _with_alternatives(logprobs, choice_request.prompt_logprobs)

    def _push_shown(self, chunk: Chunk, deltas: list[Delta]) -> TokenIds:
        """Add the output of the chunk. Return its tokens up to the end of the output.

        A hidden stop token is one of these tokens, but its text is not added.
        """
        ids = chunk.token_ids
        shown = ids
        is_stopped = chunk.finish_reason is FinishReason.STOP
        if is_stopped and ids and ids[-1] in self._choice_request.hidden_token_ids:
            shown = ids[:-1]
        if self._shows_logprobs:
            return self._push_scored(ids, shown, chunk.logprobs, deltas)
        step = self._parse(shown)
        reasoning_before = self._reasoning_tokens
        self._note_step(step)
        if self._stops is None and not step.num_calls and self._options.shows_reasoning:
            deltas += step.deltas
        else:
            self._add(step.deltas, deltas)
        if self._may_end_within_step:
            has_ended = self.finish is not None
            # A single token belongs to the output as a whole.
            if has_ended and len(ids) > 1:
                # `_num_used` counts the reasoning of this step again, up to the end of the output.
                self._reasoning_tokens = reasoning_before
                return shown[: self._num_used(shown)]
            self._earlier_ids.extend(shown)
        return ids

    def _push_scored(
        self, ids: TokenIds, shown: TokenIds, logprobs: Sequence[TokenLogprob], deltas: list[Delta]
    ) -> TokenIds:
        """Parse token by token, to decide for each log-probability whether it belongs to text."""
        for index in range(len(shown)):
            step = self._parse(shown[index : index + 1])
            self._note_step(step)
            parsed = step.deltas
            if index < len(logprobs):
                parsed = self._scored(step, logprobs[index])
            self._add(parsed, deltas)
            if self.finish is not None:
                return ids[: index + 1]
        return ids

    def _num_used(self, ids: TokenIds) -> int:
        """Return how many tokens of the last step belong to the output, and count their reasoning.

        The parser does not report to which token a text belongs. So another choice parses the
        output again: the earlier tokens in one call, and the tokens of the last step one by one.
        This happens at most once for a choice.
        """
        replay = Choice(self._choice_request)
        unused: list[Delta] = []
        earlier = replay._parse(self._earlier_ids)
        replay._add(earlier.deltas, unused)
        num_used = 0
        while num_used < len(ids) and replay.finish is None:
            step = replay._parse(ids[num_used : num_used + 1])
            self._reasoning_tokens += step.reasoning_tokens
            replay._add(step.deltas, unused)
            num_used += 1
        return num_used

    def _note_step(self, step: StepOutput) -> None:
        """Count reasoning tokens, and note whether there was a tool call or text of the answer."""
        self._reasoning_tokens += step.reasoning_tokens
        if step.num_calls:
            self._saw_tool_call = True
        if self._awaits_answer:
            self._awaits_answer = not any(
                delta.text and delta.channel in _ANSWER for delta in step.deltas
            )

    def _add(self, parsed: Iterable[Delta], deltas: list[Delta]) -> None:
        """Add parsed deltas up to the end of the output, and set `finish` there.

        The output may end at a stop string, or before a second call that the client does not allow.
        """
        for delta in parsed:
            channel = delta.channel
            if channel is not self._text_channel:
                self._release(deltas)  # a stop string can't go on in another channel
            if channel is _REASONING:
                if self._options.shows_reasoning:
                    deltas.append(delta)
            elif channel is not _CALL:
                self._text_channel = channel
                if self._stops is not None:
                    text, is_stopped = self._stops.push(delta.text)
                    # If `push` returns its argument, no text is withheld, and none was before.
                    if text is not delta.text:
                        delta = Delta(channel=channel, text=text, logprobs=delta.logprobs)
                    if is_stopped:
                        self.finish = "stop"
                if delta.text or delta.logprobs:
                    deltas.append(delta)
            elif delta.call_index > 0 and not self._options.parallel_tool_calls:
                # The output ends before this call.
                self.finish = "tool_calls"
            else:
                deltas.append(delta)
            if self.finish is not None:
                return

    def _release(self, deltas: list[Delta]) -> None:
        """Add the text that may have been the beginning of a stop string."""
        if self._stops is None:
            return
        text = self._stops.flush()
        if text:
            deltas.append(Delta(channel=self._text_channel, text=text))

    def _end(self, reason: FinishReason, deltas: list[Delta]) -> None:
        """Add the output that the parser withheld, and set `finish`."""
        step = self._finish_parser()
        self._note_step(step)
        self._add(step.deltas, deltas)
        if self.finish is not None:
            return
        self._release(deltas)
        if reason is FinishReason.STOP and self._saw_tool_call:
            self.finish = "tool_calls"
        elif reason is FinishReason.STOP:
            # Some engines let a model end within its reasoning. With "stop", clients would parse an
            # empty answer.
            self.finish = "length" if self._awaits_answer else "stop"
        elif reason is FinishReason.LENGTH:
            self.finish = "length"
        else:
            raise StreamIncomplete(
                f"the stream ended with {reason.value!r}, and no decode call followed"
            )

    def _scored(self, step: StepOutput, logprob: TokenLogprob) -> tuple[Delta, ...]:
        """Return the deltas of one token with its log-probability, if that belongs to text."""
        # Most tokens have one delta.
        if len(step.deltas) == 1:
            only = step.deltas[0]
            if only.channel is not _REASONING and only.channel is not _CALL:
                self._in_content = True
                return (Delta(channel=only.channel, text=only.text, logprobs=(logprob,)),)
        last_text: int | None = None  # the index of the last delta with text that is shown
        for index, delta in enumerate(step.deltas):
            if delta.channel is not _REASONING and delta.channel is not _CALL:
                last_text = index
        if not self._belongs_to_text(step, logprob.token_id, has_text=last_text is not None):
            return step.deltas
        if last_text is None:
            return (*step.deltas, Delta(channel=self._text_channel, logprobs=(logprob,)))
        text = step.deltas[last_text]
        scored = Delta(channel=text.channel, text=text.text, logprobs=(logprob,))
        return (*step.deltas[:last_text], scored, *step.deltas[last_text + 1 :])

    def _belongs_to_text(self, step: StepOutput, token_id: int, *, has_text: bool) -> bool:
        """Return whether the log-probability of a token is shown.

        Args:
            step: what the parser made of the token.
            token_id: the token.
            has_text: the step has text that is shown.
        """
        if not self._choice_request.content_logprobs_only:
            return True
        if step.deltas or step.reasoning_tokens:
            self._in_content = has_text
            return has_text
        # The token gave no text. If it is a part of a character of the content, it belongs to the
        # text. If it is a marker, it does not.
        if not self._in_content:
            return False
        return HALF_CHARACTER in self._choice_request.renderer.token_text(token_id)


def _with_alternatives(
    logprobs: Sequence[TokenLogprob], max_alternatives: int | None
) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities, each with at most `max_alternatives` alternative tokens.

    None: return no log-probabilities.
    """
    if max_alternatives is None:
        return NO_LOGPROBS
    return tuple(
        TokenLogprob(token.token_id, token.logprob, token.top[:max_alternatives])
        for token in logprobs
    )


def pick_best_of(
    deltas: Sequence[ChoiceDelta], plan: GenerationPlan, likelihood: Callable[[int], float]
) -> Iterator[ChoiceDelta]:
    """Yield the deltas of each prompt's `keep` likeliest candidates, best first and renumbered.

    Args:
        deltas: the deltas of all candidates.
        plan: its choices are the candidates. Those of one prompt are consecutive.
        likelihood: returns the likelihood of the candidate with an index.
    """
    by_candidate: list[list[ChoiceDelta]] = [[] for _ in plan.choices]
    for delta in deltas:
        by_candidate[delta.index].append(delta)
    answers = itertools.count()
    for first in range(0, len(by_candidate), plan.candidates):
        ranked = sorted(range(first, first + plan.candidates), key=likelihood, reverse=True)
        for candidate in ranked[: plan.keep]:
            index = next(answers)
            for delta in by_candidate[candidate]:
                yield msgspec.structs.replace(delta, index=index)


def share_suspicions(choices: Sequence[Choice], candidates: int) -> None:
    """Give all choices of a prompt one suspicion: each death of a worker is charged to all of them.

    A request has MAX_SUSPICIONS suspicions at most, which its prompts share. All choices of one
    suspicion run on the same workers. So a request with many deadly prompts can't end all workers.

    Args:
        choices: the choices of one request.
        candidates: how many consecutive choices have the same prompt. Prompts may repeat.
    """
    by_prompt: dict[bytes, Suspicion] = {}
    suspicions: list[Suspicion] = []
    for first in range(0, len(choices), candidates):
        prompt = choices[first].prompt_bytes()
        suspicion = by_prompt.get(prompt)
        if suspicion is None:
            if len(by_prompt) < MAX_SUSPICIONS:
                suspicions.append(Suspicion(is_shared=True))
            suspicion = suspicions[len(by_prompt) % MAX_SUSPICIONS]
            suspicion.num_prompts += 1
            by_prompt[prompt] = suspicion
        for choice in choices[first : first + candidates]:
            choice.timeline.suspicion = suspicion
