"""Checked OpenAI request + served model → what the pipeline runs. Pure: no await, no clock; safe in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_trtllm.errors import ContextTooLong, InvalidRequest, UnsupportedParameter
from dynamo_trtllm.frontend.models import ServedModel
from dynamo_trtllm.messages import Conversation, GenerateRequest, Message, Sampling, TokenIds, Tool, ToolCall, token_ids
from dynamo_trtllm.openai.chat import AssistantMessage, ChatMessage, ChatRequest, ToolMessage
from dynamo_trtllm.openai.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from dynamo_trtllm.openai.sampling import SamplingFields
from dynamo_trtllm.render.base import OutputParser, Renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What the edge adds to a request."""

    request_id: str
    deadline: float  # seconds since the epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One choice of an answer, ready to run. The parser is fresh and belongs to it."""

    request: GenerateRequest
    renderer: Renderer
    parser: OutputParser
    stop: tuple[str, ...]
    hidden_token_ids: frozenset[int]  # stop tokens the client chose: they end the text and are not part of it
    content_logprobs_only: bool  # chat: no log-probabilities of markers and reasoning
    shows_logprobs: bool = True  # False: best_of alone asked the engine for them
    echo: str = ""  # the answer begins with this text


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One HTTP request: one pipeline request per choice, in the order of the prompts.

    Of each `candidates` consecutive choices (those of one prompt) the `keep` likeliest are answered.
    """

    choices: tuple[Prepared, ...]
    candidates: int = 1  # best_of, or n
    keep: int = 1  # n


def prepare_chat(body: ChatRequest, served: ServedModel, identity: Identity) -> Plan:
    """Raises InvalidRequest, UnsupportedParameter or ContextTooLong, each naming the field."""
    renderer = served.renderer
    conversation = _conversation(body, served)
    ids = renderer.render(conversation)
    max_tokens = _output_budget(body.output_tokens, len(ids), served, field="messages")
    sampling = _sampling(
        body,
        served,
        max_tokens,
        () if body.past_eos else renderer.stop_token_ids,
        body.top_logprobs if body.logprobs else None,
    )
    choice = Prepared(
        request=_request(served, ids, sampling, identity),
        renderer=renderer,
        parser=renderer.chat_parser(),
        stop=tuple(body.stop),
        hidden_token_ids=_hidden(body, served),
        content_logprobs_only=True,
    )
    return Plan(choices=(choice,))


def prepare_text(body: CompletionRequest, served: ServedModel, identity: Identity) -> Plan:
    """As `prepare_chat`; the prompt goes to the model as it is."""
    renderer = served.renderer
    ids = renderer.encode(body.prompt) if isinstance(body.prompt, str) else _checked_ids(body.prompt, served, "prompt")
    if not ids:
        raise InvalidRequest("prompt is empty; send at least one token", field="prompt")
    wanted = body.max_tokens
    if wanted is None:
        wanted = min(DEFAULT_MAX_TOKENS, max(1, served.card.context_length - len(ids)))
    max_tokens = _output_budget(wanted, len(ids), served, field="prompt")
    choice = Prepared(
        request=_request(served, ids, _sampling(body, served, max_tokens, (), body.logprobs), identity),
        renderer=renderer,
        parser=renderer.text_parser(),
        stop=tuple(body.stop),
        hidden_token_ids=_hidden(body, served),
        content_logprobs_only=False,
    )
    return Plan(choices=(choice,))


def _request(served: ServedModel, ids: TokenIds, sampling: Sampling, identity: Identity) -> GenerateRequest:
    return GenerateRequest(
        request_id=identity.request_id,
        model=served.card.name,
        token_ids=ids,
        sampling=sampling,
        deadline=identity.deadline,
    )


def _output_budget(wanted: int | None, prompt_tokens: int, served: ServedModel, *, field: str) -> int:
    context = served.card.context_length
    room = context - prompt_tokens
    if room < 1:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens and the context of {served.card.name} is {context} tokens, "
            f"prompt and answer together; shorten the prompt by at least {1 - room} tokens",
            field=field,
        )
    if wanted is not None and wanted > room:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens and max_tokens asks for {wanted} more, {prompt_tokens + wanted} "
            f"together; the context of {served.card.name} is {context} tokens: set max_tokens to at most {room}",
            field="max_tokens",
        )
    return room if wanted is None else wanted


def _sampling(
    body: SamplingFields, served: ServedModel, max_tokens: int, format_stops: Sequence[int], logprobs: int | None
) -> Sampling:
    if body.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {body.min_tokens} and more than max_tokens, {max_tokens}", field="min_tokens"
        )
    own = _checked_ids(body.stop_token_ids, served, "stop_token_ids")
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(0, body.top_k),
        seed=body.seed,
        stop_token_ids=tuple(dict.fromkeys((*own, *format_stops))),
        ignore_eos=body.past_eos,
        logprobs=logprobs,
    )


def _checked_ids(ids: Sequence[int], served: ServedModel, field: str) -> TokenIds:
    size = served.card.vocab_size
    if ids and max(ids) >= size:
        bad = next(index for index, token_id in enumerate(ids) if token_id >= size)
        raise InvalidRequest(
            f"{field}[{bad}] is {ids[bad]}, which is no token of {served.card.name}: its ids go from 0 to {size - 1}",
            field=field,
        )
    return token_ids(ids)


def _hidden(body: SamplingFields, served: ServedModel) -> frozenset[int]:
    return frozenset(body.stop_token_ids) - set(served.renderer.stop_token_ids) - set(served.card.eos_token_ids)


def _conversation(body: ChatRequest, served: ServedModel) -> Conversation:
    template_args = {name: value for name, value in body.template_args.items() if name != "reasoning_effort"}
    if template_args and served.card.renderer == "harmony":
        name = min(template_args)
        raise UnsupportedParameter(
            f"chat_template_args.{name} means nothing to {served.card.name}, which has no chat template; leave it out",
            field=f"chat_template_args.{name}",
        )
    tools = body.tools if body.tool_choice == "auto" else []
    return Conversation(
        messages=tuple(_message(message) for message in body.messages),
        tools=tuple(
            Tool(name=t.function.name, description=t.function.description, parameters=t.function.parameters)
            for t in tools
        ),
        reasoning_effort=body.reasoning_effort or body.template_args.get("reasoning_effort") or "medium",
        template_args=template_args,
    )


def _message(message: ChatMessage) -> Message:
    if isinstance(message, AssistantMessage):
        return Message(
            role=message.role,
            content=message.content,
            name=message.name,
            reasoning=message.reasoning_content or message.reasoning,
            tool_calls=tuple(
                ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
                for call in message.tool_calls
            ),
        )
    call_id = message.tool_call_id if isinstance(message, ToolMessage) else None
    return Message(role=message.role, content=message.content, name=message.name, tool_call_id=call_id)
