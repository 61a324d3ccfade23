"""Checked OpenAI request + served model → what the pipeline runs. Pure: no await, no clock; safe in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dynamo_trtllm.api.chat import ChatRequest
from dynamo_trtllm.api.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from dynamo_trtllm.api.sampling import SEED_LIMIT
from dynamo_trtllm.errors import ContextTooLong, InvalidRequest
from dynamo_trtllm.frontend.conversation import chat_conversation, chat_options, render_prompt, sampling_of
from dynamo_trtllm.frontend.model_registry import ServedModel
from dynamo_trtllm.frontend.options import (
    ANY_OBJECT,
    GenerationOptions,
    constraints_of,
    reject,
    reject_unsupported,
    visible_tools,
)
from dynamo_trtllm.messages import Conversation, GenerateRequest, Sampling, TokenIds, token_ids
from dynamo_trtllm.tokenization.base import OutputParser, Renderer

_MAX_PROMPT_TOKENS = 2 << 20  # of all choices together: each is sent to its worker by itself
_MAX_ECHO_CHARS = 8 << 20  # of all choices; n = 128 would make an answer 128 times as large as its request
_LEAST_TEMPERATURE = 1e-5  # below, a choice is greedy, and the logits divided by it may be no numbers any more


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """What the edge adds to a request."""

    request_id: str
    deadline: float  # seconds since the epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRequest:
    """One choice of an answer, ready to run. The parser is fresh and belongs to it."""

    request: GenerateRequest
    renderer: Renderer
    parser: OutputParser
    stop: tuple[str, ...]
    hidden_token_ids: frozenset[int]  # stop tokens the client chose: they end the text and are not part of it
    content_logprobs_only: bool  # chat: no log-probabilities of markers and reasoning
    shows_logprobs: bool = True  # False: best_of alone asked the engine for them
    echo: str = ""  # the answer begins with this text
    max_tool_calls: int | None = None  # the answer ends where one more would begin

    @property
    def ends_with_engine(self) -> bool:
        """Only the engine's terminal chunk ends it, nothing that is found in its text."""
        return not self.stop and self.max_tool_calls is None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """One HTTP request: one pipeline request per choice, in the order of the prompts.

    Of each `candidates` consecutive choices (those of one prompt) the `keep` likeliest are answered.
    """

    choices: tuple[ChoiceRequest, ...]
    candidates: int = 1  # best_of, or n
    keep: int = 1  # n


def prepare_chat(body: ChatRequest, served: ServedModel, context: RequestContext) -> GenerationPlan:
    """Raises InvalidRequest, UnsupportedParameter or ContextTooLong, each naming the field."""
    return prepare_conversation(chat_conversation(body), chat_options(body, served.card), served, context)


def prepare_conversation(
    conversation: Conversation, options: GenerationOptions, served: ServedModel, context: RequestContext
) -> GenerationPlan:
    """As `prepare_chat`, for every API that has conversations. `conversation.tools`: all that the client sent."""
    renderer, requested = served.renderer, options.sampling
    reject_unsupported(requested, options.cache_salt, served.card, options.names)
    tools = visible_tools(conversation.tools, options)
    schema = options.json_schema if options.json_schema != ANY_OBJECT else None
    prompt = render_prompt(
        msgspec.structs.replace(conversation, tools=tools, answer_schema=schema or ""), served, options
    )
    prefill_ids, guided = constraints_of(tools, options, served)
    ids = prompt + prefill_ids
    sampling = _sampling(
        requested, _output_budget(requested.max_tokens or None, len(ids), served, options), served, options
    )
    stops = () if requested.ignore_eos else renderer.stop_token_ids
    sampling = msgspec.structs.replace(
        sampling, guided=guided, stop_token_ids=tuple(dict.fromkeys((*requested.stop_token_ids, *stops)))
    )
    choices = tuple(
        ChoiceRequest(
            request=request,
            renderer=renderer,
            parser=renderer.chat_parser(prefill_ids=prefill_ids),
            stop=options.stop,
            hidden_token_ids=_hidden_token_ids(requested, served),
            content_logprobs_only=True,
            max_tool_calls=None if options.parallel_tool_calls else 1,
        )
        for request in _requests([(ids, sampling)] * options.n, served, context, options.cache_salt)
    )
    return GenerationPlan(choices=choices, candidates=options.n, keep=options.n)


def prepare_text(body: CompletionRequest, served: ServedModel, context: RequestContext) -> GenerationPlan:
    """As `prepare_chat`; the prompts go to the model as they are."""
    requested, renderer = sampling_of(body, served.card, body.max_tokens, body.logprobs), served.renderer
    options = GenerationOptions(sampling=requested, stop=tuple(body.stop), names={"messages": "prompt"})
    reject_unsupported(requested, body.salt, served.card, options.names)
    selects_best = body.candidates > body.n
    if selects_best and "logprobs" in served.card.unsupported_features:
        reject("best_of", served.card, "its engine gives no log-probabilities to choose by")
    if selects_best and requested.logprobs is None:
        requested = msgspec.structs.replace(requested, logprobs=0)
    prompts = [_prompt_ids(prompt, served) for prompt in body.prompt]
    calls = []
    for ids in prompts:
        wanted = body.max_tokens
        if wanted is None:
            wanted = min(DEFAULT_MAX_TOKENS, max(1, served.card.context_length - len(ids)))
        budget = _output_budget(wanted, len(ids), served, options)
        calls += [(ids, _sampling(requested, budget, served, options))] * body.candidates
    texts = [_text(prompt, served) if body.echo else "" for prompt in body.prompt]
    if (size := sum(map(len, texts)) * body.n) > _MAX_ECHO_CHARS:
        raise InvalidRequest(
            f"the answer would repeat {size} characters of prompts; echo returns at most {_MAX_ECHO_CHARS}: lower n",
            field="echo",
        )
    echoes = [text for text in texts for _ in range(body.candidates)]
    choices = tuple(
        ChoiceRequest(
            request=request,
            renderer=renderer,
            parser=renderer.text_parser(),
            stop=options.stop,
            hidden_token_ids=_hidden_token_ids(requested, served),
            content_logprobs_only=False,
            shows_logprobs=body.logprobs is not None,
            echo=echo,
        )
        for request, echo in zip(_requests(calls, served, context, body.salt), echoes, strict=True)
    )
    return GenerationPlan(choices=choices, candidates=body.candidates, keep=body.n)


def _prompt_ids(prompt: str | list[int], served: ServedModel) -> TokenIds:
    ids = served.renderer.encode(prompt) if isinstance(prompt, str) else _checked_ids(prompt, served, "prompt")
    if not ids:
        raise InvalidRequest("prompt is empty; send at least one token", field="prompt")
    return ids


def _text(prompt: str | list[int], served: ServedModel) -> str:
    return prompt if isinstance(prompt, str) else served.renderer.decode(token_ids(prompt))


def _requests(
    calls: Sequence[tuple[TokenIds, Sampling]], served: ServedModel, context: RequestContext, cache_salt: str | None
) -> list[GenerateRequest]:
    """One request per prompt and choice. Choice i has the seed plus i: equal seeds would give equal choices."""
    if (tokens := sum(len(ids) for ids, _ in calls)) > _MAX_PROMPT_TOKENS:
        raise InvalidRequest(
            f"{len(calls)} choices have prompts of {tokens} tokens together, of at most {_MAX_PROMPT_TOKENS}: lower "
            "n, or send several requests",
            field="n",
        )
    return [
        GenerateRequest(
            request_id=context.request_id if len(calls) == 1 else f"{context.request_id}-{index}",
            model=served.card.name,
            token_ids=ids,
            sampling=sampling
            if sampling.seed is None
            else msgspec.structs.replace(sampling, seed=_wrapped(sampling.seed + index)),
            deadline=context.deadline,
            cache_salt=cache_salt,
        )
        for index, (ids, sampling) in enumerate(calls)
    ]


def _wrapped(seed: int) -> int:
    """Within 64 signed bits, as the wire takes it."""
    return (seed + SEED_LIMIT) % (2 * SEED_LIMIT) - SEED_LIMIT


def _output_budget(wanted: int | None, prompt_tokens: int, served: ServedModel, options: GenerationOptions) -> int:
    context = served.card.context_length
    available = context - prompt_tokens
    if available < 1:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens and the context of {served.card.name} is {context} tokens, "
            f"prompt and answer together; shorten the prompt by at least {1 - available} tokens",
            field=options.name("messages"),
        )
    if wanted is not None and wanted > available:
        name = options.name("max_tokens")
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens and {name} asks for {wanted} more, {prompt_tokens + wanted} "
            f"together; the context of {served.card.name} is {context} tokens: set {name} to at most {available}",
            field=name,
        )
    return available if wanted is None else wanted


def _sampling(requested: Sampling, max_tokens: int, served: ServedModel, options: GenerationOptions) -> Sampling:
    """What was asked, checked against the model, with its budget."""
    if requested.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {requested.min_tokens} and more than {options.name('max_tokens')}, {max_tokens}",
            field="min_tokens",
        )
    _checked_ids(requested.stop_token_ids, served, "stop_token_ids")
    _checked_ids([token_id for token_id, _ in requested.logit_bias], served, "logit_bias")
    return msgspec.structs.replace(
        requested,
        max_tokens=max_tokens,
        top_k=min(requested.top_k, served.card.vocab_size),  # engines' integers have 64 bits or fewer
        temperature=requested.temperature if requested.temperature >= _LEAST_TEMPERATURE else 0.0,
    )


def _checked_ids(ids: Sequence[int], served: ServedModel, field: str) -> TokenIds:
    size = served.card.vocab_size
    if ids and max(ids) >= size:
        bad = next(index for index, token_id in enumerate(ids) if token_id >= size)
        where = field if field == "logit_bias" else f"{field}[{bad}]"
        raise InvalidRequest(
            f"{where} names {ids[bad]}, which is no token of {served.card.name}: its ids go from 0 to {size - 1}",
            field=field,
        )
    return token_ids(ids)


def _hidden_token_ids(requested: Sampling, served: ServedModel) -> frozenset[int]:
    return frozenset(requested.stop_token_ids) - set(served.renderer.stop_token_ids) - set(served.card.eos_token_ids)
