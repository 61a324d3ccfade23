"""Convert a checked OpenAI request to generation requests for a model.

Pure: no await, no clock; safe in a thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from dynamo_trtllm.frontend.api.chat import ChatRequest
from dynamo_trtllm.frontend.api.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from dynamo_trtllm.frontend.api.sampling import ANY_OBJECT, SEED_LIMIT, SamplingFields
from dynamo_trtllm.frontend.requests.conversation import (
    Constraints,
    GenerationOptions,
    chat_conversation,
    chat_options,
    constraints_of,
    format_names,
    reject,
    reject_unsupported,
    render_prompt,
    sampling_of,
    text_format,
    visible_tools,
)
from dynamo_trtllm.frontend.tokenization.conversation import Conversation
from dynamo_trtllm.frontend.tokenization.output import OutputParser
from dynamo_trtllm.frontend.tokenization.renderer import NO_FORCED_IDS, Renderer
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.frontend.tokenization.text_parsers import MAX_CHARACTER_TOKENS
from dynamo_trtllm.protocol.counted import counted
from dynamo_trtllm.protocol.errors import ContextTooLong, InvalidRequest
from dynamo_trtllm.protocol.messages import GenerateRequest, Sampling, TokenIds, token_ids

B = TypeVar("B", bound=SamplingFields)

# Limit of the prompts of all choices together, because each choice sends its own prompt.
MAX_PROMPT_TOKENS = 2 << 20
# Limit of the prompts that all choices echo together: with n = 128, a response could be 128 times
# as large as its request.
_MAX_ECHO_CHARS = 8 << 20
# Limit of the prompt tokens of all choices that get log-probabilities, because the response has
# several numbers and texts for each of them. It is for tokens with _SCORED_ENTRIES entries: the
# token itself and five alternatives. If tokens have more entries, fewer tokens are allowed.
_MAX_SCORED_TOKENS = 64 << 10
_SCORED_ENTRIES = 6
# Lower temperatures count as 0 (greedy), because dividing logits by them may overflow.
_LEAST_TEMPERATURE = 1e-5


class _PromptedSampling(NamedTuple):
    """The prompt and the sampling values of one choice."""

    prompt_ids: TokenIds
    sampling: Sampling


class ChoiceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a choice of a response needs to run: the call to workers, and how to read its output."""

    request: GenerateRequest
    renderer: Renderer
    make_parser: Callable[[], OutputParser]  # each call returns a parser of the whole output
    options: GenerationOptions
    hidden_token_ids: frozenset[int]  # the client's stop tokens, which are not part of the text
    content_logprobs_only: bool  # for chat: without log-probabilities of markers and reasoning
    shows_logprobs: bool = True  # False: the engine computes them only for best_of
    echo: str = ""  # the text begins with this
    # The choice's `logprobs` begin with the tokens of the prompt, each with this many alternatives.
    # None: they have no tokens of the prompt.
    echo_logprobs: int | None = None
    # The field `prompt_logprobs` has this many alternatives for each token of the prompt. None: the
    # response does not have this field.
    prompt_logprobs: int | None = None
    # The client wants no generated token, but the engine generates one.
    is_prompt_only: bool = False
    # The API's names by internal field names, for errors.
    names: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """True if a chunk without a finish reason needs nothing but parsing.

        The text of such a chunk never ends the choice.
        """
        options = self.options
        may_end_early = bool(options.stop) or not options.parallel_tool_calls
        has_logprobs = (
            self.request.sampling.logprobs is not None or self.prompt_logprobs is not None
        )
        is_changed = options.returns_token_ids or not options.shows_reasoning
        is_formatted = options.output_format is not None
        return not (
            may_end_early or self.is_prompt_only or has_logprobs or is_changed or is_formatted
        )


class GenerationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The generation requests of one HTTP request: one per choice, in the order of the prompts.

    Each prompt has `candidates` consecutive choices. The `keep` likeliest of them are returned.
    """

    choices: tuple[ChoiceRequest, ...]
    candidates: int = 1  # the value of `best_of`; without this field, of `n`
    keep: int = 1  # the value of `n`
    ignored: tuple[str, ...] = ()  # fields that have no effect on this model
    # Only for `/v1/responses`: the items of earlier turns, then the items of the request.
    items: tuple[dict[str, Any], ...] = ()

    @property
    def deadline(self) -> float:
        """Return the deadline of the request, in seconds since the epoch."""
        return self.choices[0].request.deadline

    @property
    def longest_prompt(self) -> int:
        """Return the number of tokens of the longest prompt."""
        return max(len(choice.request.token_ids) for choice in self.choices)

    @property
    def one_choice_per_prompt(self) -> tuple[ChoiceRequest, ...]:
        """Return the first choice of each prompt."""
        return self.choices[:: self.candidates]

    @property
    def max_tokens(self) -> int:
        """Return how many tokens prompts and output take at most, as far as the request says."""
        total = sum(len(choice.request.token_ids) for choice in self.one_choice_per_prompt)
        for choice in self.choices:
            total += choice.options.sampling.max_tokens or 0
        return total

    @property
    def is_scored(self) -> bool:
        """Return whether the output has log-probabilities."""
        sampling = self.choices[0].request.sampling
        return sampling.logprobs is not None or sampling.prompt_logprobs is not None


def prepare_chat(body: ChatRequest, served: ServedModel, call: GenerateRequest) -> GenerationPlan:
    """Plan a chat request. `call`: the call to workers, still without prompt and sampling values.

    Raises:
        InvalidRequest, UnsupportedParameter, ContextTooLong: `field` is the wrong field.
    """
    conversation = chat_conversation(body)
    options = chat_options(body, served.card)
    plan = prepare_conversation(conversation, options, served, call)
    known = served.renderer.variables
    ignored = [body.template_arg_path(name) for name in body.template_args if name not in known]
    if not body.skip_special_tokens and served.card.renderer == "harmony":
        # The format uses all its special tokens as markers. None of them is text.
        ignored.append("skip_special_tokens")
    if not ignored:
        return plan
    return msgspec.structs.replace(plan, ignored=(*plan.ignored, *ignored))


def prepare_conversation(
    conversation: Conversation,
    options: GenerationOptions,
    served: ServedModel,
    call: GenerateRequest,
) -> GenerationPlan:
    """Plan a conversation of any API.

    `conversation.tools` are all tools of the request. Raises the errors of `prepare_chat`.
    """
    renderer = served.renderer
    requested = options.sampling
    reject_unsupported(options, call.cache_salt, served.card)
    prompt = conversation_prompt(conversation, options, served)
    ids = prompt.ids
    constraints = prompt.constraints
    if not ids:
        raise InvalidRequest(
            "the model's chat template makes an empty prompt of the messages; send text",
            field=options.name("messages"),
        )
    if requested.prompt_logprobs is not None:
        _check_scored(len(ids), requested.prompt_logprobs, "prompt_logprobs")
    # A limit of 0 means as many tokens as the context allows.
    wanted = requested.max_tokens if requested.max_tokens else None
    budget = _output_budget(wanted, len(ids), served, options)
    sampling = msgspec.structs.replace(
        _sampling(requested, budget, served, options),
        guided=constraints.guided,
        stop_token_ids=_stop_token_ids(requested, renderer),
    )
    # All choices have the same prompt, so only the first one gets the prompt's log-probabilities.
    unscored = msgspec.structs.replace(sampling, prompt_logprobs=None)
    per_choice = [_PromptedSampling(ids, sampling)]
    per_choice += [_PromptedSampling(ids, unscored)] * (options.n - 1)
    make_parser = functools.partial(
        renderer.chat_parser,
        forced_ids=constraints.forced_ids,
        hidden=_no_text_ids(sampling, served, options),
    )
    # The choices share these ids, because a request may have many.
    hidden_token_ids = _hidden_token_ids(requested, served)
    names = {**options.names, "guided": constraints.field}
    choices = tuple(
        ChoiceRequest(
            request=request,
            renderer=renderer,
            make_parser=make_parser,
            options=options,
            hidden_token_ids=hidden_token_ids,
            content_logprobs_only=True,
            names=names,
            prompt_logprobs=request.sampling.prompt_logprobs,
        )
        for request in _requests(per_choice, call)
    )
    ignored = constraints.ignored
    if prompt.drops_names:
        ignored = (*ignored, "name")
    return GenerationPlan(choices=choices, candidates=options.n, keep=options.n, ignored=ignored)


def _stop_token_ids(requested: Sampling, renderer: Renderer) -> tuple[int, ...]:
    """Return the stop tokens of the request and, unless it ignores them, of the model's format."""
    stops = list(requested.stop_token_ids)
    if not requested.ignore_eos:
        stops += renderer.stop_token_ids
    without_duplicates = dict.fromkeys(stops)
    return tuple(without_duplicates)


class ConversationPrompt(NamedTuple):
    """The prompt of a conversation, and how its output is constrained."""

    ids: TokenIds
    constraints: Constraints
    drops_names: bool  # the prompt would be the same without the name of a message


def conversation_prompt(
    conversation: Conversation, options: GenerationOptions, served: ServedModel
) -> ConversationPrompt:
    """Return the prompt of a conversation. It may be longer than the context.

    If the beginning of the output is forced, it is a part of the prompt. Raises the errors of
    `prepare_chat`.
    """
    tools = visible_tools(conversation.tools, options)
    schema = ""
    if options.output_format is not None and options.output_format.json_schema != ANY_OBJECT:
        schema = options.output_format.json_schema
    shown = msgspec.structs.replace(conversation, tools=tools, answer_schema=schema)
    prompt = render_prompt(shown, served, options)
    constraints = constraints_of(tools, options, served)
    forced_ids = constraints.forced_ids if conversation.opens_answer else NO_FORCED_IDS
    other_tokens = len(forced_ids) + max(1, options.sampling.max_tokens)
    ids = _truncated(prompt.ids, other_tokens, served, options) + forced_ids
    return ConversationPrompt(ids, constraints, prompt.drops_names)


def prepare_text(
    body: CompletionRequest, served: ServedModel, call: GenerateRequest
) -> GenerationPlan:
    """Plan a text completion request, whose prompts are not changed.

    Raises the errors of `prepare_chat`.
    """
    requested = sampling_of(body, served.card, body.output_tokens, body.logprobs)
    options = _text_options(body, requested)
    reject_unsupported(options, call.cache_salt, served.card)
    if body.candidates > body.n:
        requested = _scored(requested, served)
    # With max_tokens 0, too, the engine generates one token, which is not returned.
    wanted = DEFAULT_MAX_TOKENS if body.output_tokens is None else max(1, body.output_tokens)
    full_prompts = [_prompt_ids(prompt, served) for prompt in body.prompt]
    prompts = [_truncated(ids, wanted, served, options) for ids in full_prompts]
    requested = msgspec.structs.replace(
        requested,
        guided=text_format(options, served),
        prompt_logprobs=_prompt_logprobs(body, prompts, served),
    )
    per_choice = []
    for ids in prompts:
        max_tokens = wanted
        if body.output_tokens is None:
            # The default is lowered to what the prompt leaves of the context.
            max_tokens = max(1, min(wanted, served.card.context_length - len(ids)))
        budget = _output_budget(max_tokens, len(ids), served, options)
        prompted = _PromptedSampling(ids, _sampling(requested, budget, served, options))
        per_choice += [prompted] * body.candidates
    echoes = _echoes(body, full_prompts, prompts, served)
    no_text_ids = _no_text_ids(requested, served, options)
    # The choices share these ids, because a request may have many.
    hidden_token_ids = _hidden_token_ids(requested, served)
    names = {**options.names, "guided": options.name("response_format")}
    choices = tuple(
        ChoiceRequest(
            request=request,
            renderer=served.renderer,
            make_parser=functools.partial(
                served.renderer.text_parser,
                no_text_ids,
                before=request.token_ids[-MAX_CHARACTER_TOKENS:],
            ),
            options=options,
            hidden_token_ids=hidden_token_ids,
            content_logprobs_only=False,
            shows_logprobs=body.logprobs is not None,
            names=names,
            echo=echo,
            echo_logprobs=body.logprobs if body.echo else None,
            prompt_logprobs=body.prompt_logprobs,
            is_prompt_only=body.output_tokens == 0,
        )
        for request, echo in zip(_requests(per_choice, call), echoes, strict=True)
    )
    return GenerationPlan(choices=choices, candidates=body.candidates, keep=body.n)


def _text_options(body: CompletionRequest, requested: Sampling) -> GenerationOptions:
    formats = body.output_formats()
    return GenerationOptions(
        sampling=requested,
        stop=tuple(body.stop),
        output_format=next(iter(formats.values()), None),
        returns_token_ids=body.return_token_ids,
        names={"messages": "prompt"} | format_names(formats),
        skip_special_tokens=body.skip_special_tokens,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )


def _scored(requested: Sampling, served: ServedModel) -> Sampling:
    """Return the sampling with log-probabilities, by which `best_of` ranks the candidates.

    Raises UnsupportedParameter if the engine does not return them.
    """
    if "logprobs" in served.card.unsupported_features:
        reject(
            "best_of",
            served.card,
            "its engine does not return the log-probabilities that best_of needs",
        )
    if requested.logprobs is not None:
        return requested
    return msgspec.structs.replace(requested, logprobs=0)


def _echoes(
    body: CompletionRequest,
    full_prompts: Sequence[TokenIds],
    prompts: Sequence[TokenIds],
    served: ServedModel,
) -> list[str]:
    """Return the text with which the output of each choice begins.

    `prompts` are the parts of `full_prompts` that are sent to the engine.
    Raises InvalidRequest if the texts are too long together.
    """
    if not body.echo:
        return [""] * (len(prompts) * body.candidates)
    texts = [
        _echo(prompt, full_ids, ids, served)
        for prompt, full_ids, ids in zip(body.prompt, full_prompts, prompts, strict=True)
    ]
    size = sum(map(len, texts)) * body.n
    if size > _MAX_ECHO_CHARS:
        raise InvalidRequest(
            f"echo would return {size} characters of prompts; at most {_MAX_ECHO_CHARS} are"
            " allowed, lower n",
            field="echo",
        )
    echoes = []
    for text in texts:
        echoes += [text] * body.candidates
    return echoes


def _prompt_logprobs(
    body: CompletionRequest, prompts: Sequence[TokenIds], served: ServedModel
) -> int | None:
    """Return the number of alternatives for each token of the prompts.

    None: no log-probabilities.
    """
    alternatives: dict[str, int] = {}  # by the field that wants them
    if body.prompt_logprobs is not None:
        alternatives["prompt_logprobs"] = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        alternatives["echo"] = body.logprobs
    if not alternatives:
        return None
    # The engine returns as many as the more demanding field wants.
    field = max(alternatives, key=lambda name: alternatives[name])
    if "prompt_logprobs" in served.card.unsupported_features:
        reject(field, served.card, "its engine does not return log-probabilities of prompts")
    num_tokens = sum(map(len, prompts)) * body.candidates
    _check_scored(num_tokens, alternatives[field], field)
    return alternatives[field]


def _check_scored(tokens: int, alternatives: int, name: str) -> None:
    """Raise InvalidRequest if the response would have too many log-probabilities of prompts.

    Args:
        tokens: prompt tokens of all choices.
        alternatives: alternatives of each token.
        name: the API's name of the field that wants them.
    """
    limit = _MAX_SCORED_TOKENS * _SCORED_ENTRIES // max(_SCORED_ENTRIES, 1 + alternatives)
    if tokens > limit:
        raise InvalidRequest(
            f"{name} would return log-probabilities of {tokens} prompt tokens; at most {limit} are"
            " allowed, send fewer prompts",
            field=name,
        )


def _truncated(
    ids: TokenIds, other_tokens: int, served: ServedModel, options: GenerationOptions
) -> TokenIds:
    """Return the end of a prompt, as `truncate_prompt_tokens` demands.

    `other_tokens`: the number of tokens that follow the prompt.
    """
    max_tokens = options.truncate_prompt_tokens
    if max_tokens is None:
        return ids
    if max_tokens < 0:
        # The client wants as many as the context allows.
        max_tokens = max(1, served.card.context_length - other_tokens)
    return ids[-max_tokens:]


def _prompt_ids(prompt: str | list[int], served: ServedModel) -> TokenIds:
    if isinstance(prompt, str):
        ids = served.renderer.encode(prompt)
    else:
        ids = checked_ids(prompt, served, "prompt")
    if not ids:
        raise InvalidRequest("prompt is empty; send at least one token", field="prompt")
    return ids


def _echo(prompt: str | list[int], full_ids: TokenIds, ids: TokenIds, served: ServedModel) -> str:
    """Return the text of a prompt. `ids` is the part of `full_ids` that is sent to the engine."""
    if isinstance(prompt, str) and len(ids) == len(full_ids):
        return prompt
    return served.renderer.decode(ids)


def _requests(
    per_choice: Sequence[_PromptedSampling], call: GenerateRequest
) -> list[GenerateRequest]:
    """Return one request for each choice.

    Choice i uses seed + i, because equal seeds give equal choices.
    """
    tokens = sum(len(prompted.prompt_ids) for prompted in per_choice)
    if tokens > MAX_PROMPT_TOKENS:
        raise InvalidRequest(
            f"the prompts of {len(per_choice)} choices have {tokens} tokens together; at most"
            f" {MAX_PROMPT_TOKENS} are allowed: lower n, or send several requests",
            field="n",
        )
    requests = []
    for index, (ids, sampling) in enumerate(per_choice):
        request_id = call.request_id
        if len(per_choice) > 1:
            request_id = f"{call.request_id}-{index}"
        if sampling.seed is not None:
            sampling = _with_seed(sampling, sampling.seed + index)
        requests.append(
            msgspec.structs.replace(call, request_id=request_id, token_ids=ids, sampling=sampling)
        )
    return requests


def _with_seed(sampling: Sampling, seed: int) -> Sampling:
    """Return the sampling with a seed, wrapped to 64 signed bits, the type on the wire."""
    wrapped = (seed + SEED_LIMIT) % (2 * SEED_LIMIT) - SEED_LIMIT
    return msgspec.structs.replace(sampling, seed=wrapped)


def _output_budget(
    wanted: int | None, prompt_tokens: int, served: ServedModel, options: GenerationOptions
) -> int:
    """Return the limit of output tokens: `wanted`, or with None all that the context allows.

    Raises:
        ContextTooLong: prompt and output exceed the context.
    """
    context = served.card.context_length
    available = context - prompt_tokens
    if available < 1:
        raise ContextTooLong(
            f"the prompt has {counted(prompt_tokens, 'token')}; the context length of"
            f" {served.card.name} is {context} tokens for prompt and output; shorten the prompt by"
            f" at least {counted(1 - available, 'token')}",
            field=options.name("messages"),
        )
    if wanted is None:
        return available
    if wanted <= available:
        return wanted
    if options.fits_context:
        return available
    name = options.name("max_tokens")
    raise ContextTooLong(
        f"the prompt has {counted(prompt_tokens, 'token')} and {name} is {wanted},"
        f" {prompt_tokens + wanted} together; the context length of {served.card.name} is"
        f" {context} tokens: set {name} to at most {available}",
        field=name,
    )


def _sampling(
    requested: Sampling, max_tokens: int, served: ServedModel, options: GenerationOptions
) -> Sampling:
    """Check the requested sampling against the model, and set the output budget."""
    if requested.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {requested.min_tokens}, but {options.name('max_tokens')} is only"
            f" {max_tokens}",
            field="min_tokens",
        )
    checked_ids(requested.stop_token_ids, served, "stop_token_ids")
    checked_ids([token_id for token_id, _ in requested.logit_bias], served, "logit_bias")
    is_greedy = requested.temperature < _LEAST_TEMPERATURE
    return msgspec.structs.replace(
        requested,
        max_tokens=max_tokens,
        # The integers of engines may have fewer bits than those of clients.
        top_k=min(requested.top_k, served.card.vocab_size),
        temperature=0.0 if is_greedy else requested.temperature,
    )


def checked_ids(ids: Sequence[int], served: ServedModel, field: str) -> TokenIds:
    """Return the token ids. Raises InvalidRequest for one that the model does not have."""
    size = served.card.vocab_size
    if ids and max(ids) >= size:
        bad = next(index for index, token_id in enumerate(ids) if token_id >= size)
        where = field if field == "logit_bias" else f"{field}[{bad}]"
        raise InvalidRequest(
            f"{where} contains {ids[bad]}, which is not a token id of {served.card.name}; valid are"
            f" 0 to {size - 1}",
            field=field,
        )
    return token_ids(ids)


def _no_text_ids(
    sampling: Sampling, served: ServedModel, options: GenerationOptions
) -> frozenset[int] | None:
    """Return the ids that are not shown as text; None: all special tokens.

    If the client wants special tokens, only the tokens that end the output are not shown, as in
    vLLM.
    """
    if options.skip_special_tokens:
        return None
    ends = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        ends.update(served.card.eos_token_ids)
    return frozenset(ends)


def _hidden_token_ids(requested: Sampling, served: ServedModel) -> frozenset[int]:
    """Return the stop tokens of the request at which the model does not stop by itself.

    The parser would show these tokens as text, so `Choice` does not pass them to it.
    """
    return (
        frozenset(requested.stop_token_ids)
        - set(served.renderer.stop_token_ids)
        - set(served.card.eos_token_ids)
    )
