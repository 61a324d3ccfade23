"""Render prompts for models with a `tokenizer.json` and a Jinja chat template, which runs in a
sandbox.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from dynamo_trtllm.frontend.tokenization.chat_output_parser import (
    END_THINK,
    END_TOOL_CALL,
    THINK,
    TOOL_CALL,
    ChatOutputParser,
)
from dynamo_trtllm.frontend.tokenization.conversation import TOOL_NAME, Conversation, Message, Tool
from dynamo_trtllm.frontend.tokenization.output import OutputParser
from dynamo_trtllm.frontend.tokenization.renderer import INLINE_BYTES, NO_FORCED_IDS
from dynamo_trtllm.frontend.tokenization.text_parsers import (
    BytesTextParser,
    TokenTextCache,
    WindowTextParser,
)
from dynamo_trtllm.frontend.tokenization.tokenizer import TOKENIZER, load_json_tokenizer
from dynamo_trtllm.models.byte_level import BYTE_OF
from dynamo_trtllm.protocol.errors import ConfigError, InvalidRequest
from dynamo_trtllm.protocol.messages import TokenIds, token_ids

# errors that a template can raise for a conversation that it does not support
_TEMPLATE_FAULTS: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    RecursionError,
)


class _Generation(Extension):
    """The tag `{% generation %}`, which marks assistant text for training.

    Here, the tag only renders its body.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Budget(threading.local):
    """The steps that the rendering on this thread may still take."""

    steps = 0


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with a limit for the steps of a rendering.

    Each value that a template reads is a step.

    Some models' templates look at all earlier messages for each message, or add texts to a growing
    text. Such a template would render a body of 1 MB for minutes, on a thread that can't be ended.
    """

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self._budget = _Budget()
        self.filters["tojson"] = self._to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)

    def begin(self) -> None:
        """Begin a rendering on this thread."""
        self._budget.steps = MAX_TEMPLATE_STEPS

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute or item. Raises InvalidRequest if there is no step left."""
        if type(obj) is Namespace and not attribute.startswith("_"):
            # A namespace has only what the template stored in it. The checks of the sandbox take
            # ten times as long.
            try:
                value = getattr(obj, attribute)
            except AttributeError:
                value = self.undefined(obj=obj, name=attribute)
        elif type(obj) is dict and attribute in obj and not hasattr(dict, attribute):
            # The sandbox would return the same value, but only after it has caught an
            # AttributeError.
            value = obj[attribute]
        else:
            value = super().getattr(obj, attribute)
        self._count(value)
        return value

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an item or attribute. Raises InvalidRequest if there is no step left."""
        value = super().getitem(obj, argument)
        self._count(value)
        return value

    def _to_json(
        self, value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any
    ) -> str:
        """Convert to JSON as Jinja's `tojson` filter does, but without HTML escapes."""
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
        self._count(text)
        return text

    def _count(self, value: Any) -> None:
        steps = 1
        if isinstance(value, str | list):
            steps += len(value) // _LENGTH_OF_A_STEP
        self._budget.steps -= steps
        if self._budget.steps < 0:
            raise InvalidRequest(
                f"the model's chat template takes more than {MAX_TEMPLATE_STEPS} steps for these"
                " messages and tools; send fewer of them",
                field="messages",
            )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


_SLOW_INLINE_BYTES: Final = 16 << 10
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"
MAX_TEMPLATE_STEPS: Final = 1_000_000  # 20,000 messages take 60,000 steps of a simple template
# Number of characters of a text, or entries of a list, that count as one more step.
_LENGTH_OF_A_STEP: Final = 4096
# Limit of values in all tool calls of a conversation: each value is an object in memory.
MAX_ARGUMENT_VALUES: Final = 100_000
_CALL_OPENINGS: Final = {"hermes": f"{TOOL_CALL}\n", "json": ""}
_THINK_MARKERS: Final = (THINK, END_THINK)
# Markers that a parser must see, even if they are special tokens.
_MARKERS: Final[Mapping[str, tuple[str, ...]]] = {
    "basic": _THINK_MARKERS,
    "deepseek_r1": _THINK_MARKERS,
    "hermes": (TOOL_CALL, END_TOOL_CALL),
}


@dataclass(eq=False)
class ChatTemplateRenderer:
    """Renderer for models with a chat template.

    The text of a special token in a message becomes the special token, because templates produce
    text. In the text for `encode`, it stays text.

    Args:
        files: contents of the model's files by name.
        stop_token_ids: ids that end an answer.
        reasoning_parser: "basic", "deepseek_r1" or "none".
        tool_call_parser: "hermes", "json" or "none".

    Raises:
        ConfigError: a file is missing or can't be parsed.
    """

    files: InitVar[Mapping[str, bytes]]
    _: KW_ONLY
    stop_token_ids: tuple[int, ...]
    call_stop_token_ids = ()
    reasoning_parser: str = "none"
    tool_call_parser: str = "none"

    is_loaded = True

    def __post_init__(self, files: Mapping[str, bytes]) -> None:
        self._tokenizer, self._is_byte_level = load_json_tokenizer(_required(files, TOKENIZER))
        config = _json_object(_required(files, TOKENIZER_CONFIG), TOKENIZER_CONFIG)
        self._variables = {
            name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token")
        }
        # Templates by name: `default`, and `tool_use` for requests with tools.
        self._templates: dict[str, jinja2.Template] = {}
        self.variables: frozenset[str] = frozenset()  # read by at least one of the templates
        environment = _BoundedEnvironment()
        self._environment = environment
        for name, source in _template_sources(files.get(CHAT_TEMPLATE), config).items():
            try:
                self._templates[name] = environment.from_string(source)
                self.variables |= meta.find_undeclared_variables(environment.parse(source))
            except jinja2.TemplateError as exc:
                raise ConfigError(f"chat template {name!r} is not valid: {exc}") from exc
        # Special tokens are hidden in texts. In the output of a chat, the markers that a parser
        # must see are not hidden.
        self._hidden = self._tokenizer.special
        self._added = self._tokenizer.added
        markers = _MARKERS.get(self.reasoning_parser, ()) + _MARKERS.get(self.tool_call_parser, ())
        self._hidden_in_chat = frozenset(
            token_id for token_id in self._hidden if self._added[token_id] not in markers
        )
        self._token_texts = {
            hidden: TokenTextCache(functools.partial(self._token_bytes, hidden))
            for hidden in (self._hidden, self._hidden_in_chat)
        }

    @property
    def inline_bytes(self) -> int:
        return INLINE_BYTES if self._tokenizer.is_fast else _SLOW_INLINE_BYTES

    def preload(self) -> None:
        self._tokenizer.encode("", is_plain=True)

    def render(self, conversation: Conversation) -> TokenIds:
        """Return the token ids of the prompt.

        Raises:
            InvalidRequest: the template rejects the messages, or tool calls have too many values or
                levels.
        """
        _check_arguments(conversation)
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                },
            }
            for tool in conversation.tools
        ]
        variables = {
            "reasoning_effort": conversation.reasoning_effort,
            **self._variables,
            **conversation.template_args,
            "messages": [_message(message) for message in conversation.messages],
            "tools": tools or None,
            "add_generation_prompt": conversation.opens_answer,
        }
        template = self._templates.get("default")
        if tools:
            template = self._templates.get("tool_use") or template
        if template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions")
        self._environment.begin()
        try:
            text = template.render(variables)
        except _TEMPLATE_FAULTS as exc:
            raise InvalidRequest(
                f"the model's chat template rejected the messages: {exc}", field="messages"
            ) from exc
        return self._tokenizer.encode(text)

    def encode(self, text: str, *, is_prompt: bool = True) -> TokenIds:
        """Tokenize a plain prompt, with a begin-of-text token if the model's tokenizer adds one."""
        return self._tokenizer.encode(text, is_plain=True, is_prompt=is_prompt)

    def decode(self, token_ids: TokenIds) -> str:
        return self._tokenizer.decode(token_ids.tolist())

    def token_text(self, token_id: int) -> str:
        alone = self._tokenizer.decode([token_id])
        if self._is_byte_level:
            return alone
        # The second of two equal tokens is not at the start.
        return self._tokenizer.decode([token_id, token_id])[len(alone) :]

    def token_texts(self, token_ids: TokenIds) -> list[str]:
        texts = {token: self._tokenizer.id_to_token(token) or "" for token in set(token_ids)}
        return [texts[token] for token in token_ids]

    def chat_parser(
        self, *, forced_ids: TokenIds = NO_FORCED_IDS, hidden: frozenset[int] | None = None
    ) -> OutputParser:
        return ChatOutputParser(
            self.text_parser(self._hidden_in_chat if hidden is None else hidden),
            reasoning_parser=self.reasoning_parser,
            tool_call_parser=self.tool_call_parser,
            forced_ids=forced_ids,
        )

    def builtin_tools(self, tools: Iterable[Tool]) -> frozenset[str]:
        return frozenset()

    def call_header(self, tool: Tool | None) -> TokenIds | None:
        """Return the token ids that force a call of the tool.

        None: no tool is given, the format of calls is unknown, or reasoning comes first
        (`deepseek_r1`).
        """
        opening = _CALL_OPENINGS.get(self.tool_call_parser)
        if tool is None or opening is None or self.reasoning_parser == "deepseek_r1":
            return None
        if TOOL_NAME.match(tool.name) is None:
            raise InvalidRequest(
                f"tool name {tool.name!r} can't be forced: use letters, digits, '_', '-' and '.'"
            )
        return self._tokenizer.encode(f'{opening}{{"name": "{tool.name}", "arguments":')

    @property
    def call_opening(self) -> str | None:
        return _CALL_OPENINGS.get(self.tool_call_parser)

    def answer_header(self) -> tuple[str, TokenIds]:
        if self.reasoning_parser != "deepseek_r1" or END_THINK not in self._added.values():
            # a marker of several tokens can't be matched among the ids of an output
            return "", token_ids()
        return END_THINK, self._tokenizer.encode(END_THINK)

    def text_parser(
        self, hidden: frozenset[int] | None = None, *, before: Sequence[int] = ()
    ) -> OutputParser:
        hidden = self._hidden if hidden is None else hidden
        if not self._is_byte_level:
            context = [token_id for token_id in before if token_id not in self._hidden]
            return WindowTextParser(self._tokenizer.decode, hidden, context)
        token_texts = self._token_texts.get(hidden)
        if token_texts is None:  # the client wants special tokens
            token_texts = TokenTextCache(functools.partial(self._token_bytes, hidden))
        return BytesTextParser(token_texts)

    def _token_bytes(self, hidden: frozenset[int], token_id: int) -> bytes:
        if token_id in hidden:
            return b""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(BYTE_OF[char] for char in token)
        except KeyError:  # the token is not in the byte-level alphabet, so it is plain text
            return token.encode()


def _message(message: Message) -> dict[str, Any]:
    """Return a message in the form that templates expect."""
    content = "\n".join(text for text in (message.preamble, message.content) if text)
    shown: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        shown["name"] = message.name
    if message.reasoning is not None:
        shown["reasoning_content"] = message.reasoning
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return shown


def _check_arguments(conversation: Conversation) -> None:
    """Reject arguments with too many values.

    The number of values is estimated by counting `,`, `[` and `{`, even inside strings.
    """
    texts = [call.arguments for message in conversation.messages for call in message.tool_calls]
    count = sum(text.count(mark) for text in texts for mark in ",[{")
    if count > MAX_ARGUMENT_VALUES:
        raise InvalidRequest(
            f"the arguments of all tool calls have {count} values (estimated by counting ',', '['"
            f" and '{{'); at most {MAX_ARGUMENT_VALUES} are allowed; remove older calls",
            field="messages",
        )


def _arguments(text: str) -> object:
    """Parse JSON arguments, because templates expect an object.

    Return text that is not JSON unchanged.
    """
    try:
        return json.loads(text)
    except RecursionError as exc:
        raise InvalidRequest(
            "the arguments of a tool call are nested too deeply", field="messages"
        ) from exc
    except ValueError:
        return text


def _required(files: Mapping[str, bytes], name: str) -> bytes:
    data = files.get(name)
    if data is None:
        raise ConfigError(f"the model has no {name}; add it to the model folder")
    return data


def _json_object(data: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as exc:
        raise ConfigError(f"{name} is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must contain a JSON object")
    return value


def _token_text(value: object) -> str:
    """Return the text of a token in tokenizer_config.json, which is a string, an object with
    `content`, or null.
    """
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _template_sources(file: bytes | None, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates by name.

    The template file overrides the entry in tokenizer_config.json.
    """
    try:
        if file is not None:
            # A byte order mark would be in every prompt.
            return {"default": file.decode("utf-8-sig")}
        match config.get("chat_template"):
            case str(source):
                return {"default": source}
            case list(entries):
                return {entry["name"]: entry["template"] for entry in entries}
            case _:
                return {}
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{CHAT_TEMPLATE} is not UTF-8: {exc}") from exc
    except (TypeError, KeyError) as exc:
        raise ConfigError(
            f"chat_template in {TOKENIZER_CONFIG} must list objects with name and template"
        ) from exc
