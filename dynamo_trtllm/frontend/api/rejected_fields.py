"""List the fields of this and other APIs that would change a response if they were supported.

Ignoring such a field would give a wrong answer without a word, so it is rejected by name. Other
fields without support are ignored and named, see `unknown_fields`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

_SAMPLER = "this sampler is not supported; use temperature, top_p, top_k and min_p"
_LENGTH = "use max_tokens"
_FORMAT = "use structured_outputs"
_TEXT_FORMAT = "use text.format"
_OUTPUT_FORMAT = "use output_config.format"
_CHAT = "use /v1/chat/completions"
_NO_AUDIO = "only text is generated"
_NO_CUT = "the prompt is never cut; send a shorter one"
_NO_CONVERSATION = "no conversation is kept; send all of it"
_WORKERS_TEMPLATE = "the workers set the template, with --custom-jinja-template"

# Fields of vLLM, SGLang, llama.cpp, Ollama and text-generation-inference. Each name has the reason
# for the rejection, or says what to send instead.
OF_ALL: Final[Mapping[str, str]] = {
    "allowed_token_ids": "use logit_bias, or a regex in structured_outputs",
    "bad_words": "use logit_bias",
    "logits_processors": "a request can't contain code",
    "truncation_side": "truncate_prompt_tokens keeps the last tokens",
    "kv_transfer_params": "the frontend controls KV transfers",
    "thinking_token_budget": "reasoning has no limit of its own; use reasoning_effort",
    "max_new_tokens": _LENGTH,
    "max_length": _LENGTH,
    "max_tokens_to_sample": _LENGTH,
    "n_predict": _LENGTH,
    "num_predict": _LENGTH,
    "min_new_tokens": "use min_tokens",
    "min_length": "use min_tokens",
    "stop_sequences": "use stop",
    "repeat_penalty": "use repetition_penalty",
    "typical_p": _SAMPLER,
    "tfs_z": _SAMPLER,
    "top_a": _SAMPLER,
    "top_n_sigma": _SAMPLER,
    "mirostat": _SAMPLER,
    "mirostat_mode": _SAMPLER,
    "dynatemp_range": _SAMPLER,
    "smoothing_factor": _SAMPLER,
    "dry_multiplier": "this penalty is not supported; use frequency_penalty or repetition_penalty",
    "xtc_probability": _SAMPLER,
}
# The values with which these fields have no effect. Some clients send all fields with such values.
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "kv_transfer_params": ({},),
    "logits_processors": ([],),
    "min_length": (0,),
    "top_n_sigma": (0, -1),
    "ebnf": ("",),
    "grammar": ("",),
    "json_schema": ("", {}),
    "regex": ("",),
    "truncation_side": ("left",),
    "stop_sequences": ([],),
    "repeat_penalty": (1,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "dynatemp_range": (0,),
    "smoothing_factor": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
}

# Fields that only chat and text completions reject.
OF_COMPLETIONS: Final[Mapping[str, str]] = {
    "guided_whitespace_pattern": "whitespace in structured output can't be chosen",
    "grammar": _FORMAT,
    "json_schema": _FORMAT,
    "regex": _FORMAT,
    "ebnf": _FORMAT,
    "max_output_tokens": _LENGTH,
    "conversation": _NO_CONVERSATION,
    "previous_response_id": f"{_NO_CONVERSATION}, or use /v1/responses",
}

# Fields that only text completions reject.
OF_TEXT_COMPLETIONS: Final[Mapping[str, str]] = {
    "suffix": "models can't fill in the middle of a text",
    "function_call": _CHAT,
    "functions": _CHAT,
    "input": "use prompt",
    "instructions": "put them into the prompt",
    "messages": _CHAT,
    "output_config": _FORMAT,
    "output_format": _FORMAT,
    "response_format": _FORMAT,
    "system": "put it into the prompt",
    # SGLang's name of a prompt, or the format of an answer in /v1/responses
    "text": "use prompt, or structured_outputs for a format",
    "tool_choice": _CHAT,
    "tools": _CHAT,
}

OF_CHAT: Final[Mapping[str, str]] = {
    "audio": _NO_AUDIO,
    "best_of": "use n",
    "chat_template": _WORKERS_TEMPLATE,
    "continue_final_message": "an answer always begins a new message",
    "documents": "send them in a message",
    "echo": "an answer never contains its prompt",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "input": "use messages",
    "instructions": "send a message with the role system",
    "moderation": "nothing is moderated",
    "output_config": "use response_format and reasoning_effort",
    "output_format": "use response_format",
    "prompt": "use messages",
    "suffix": "models can't fill in the middle of a text",
    "system": "send a message with the role system",
    "text": "use response_format",
}

OF_ASSISTANT_MESSAGES: Final[Mapping[str, str]] = {
    "audio": _NO_AUDIO,
    "function_call": "use tool_calls",
    "prefix": "an answer always begins a new message",
    "refusal": "send it as content",
}

# Other forms of an output format. If these fields were ignored, its schema would be lost.
OF_RESPONSES_FORMATS: Final[Mapping[str, str]] = {
    "json_schema": "use type 'json_schema', with name and schema",
    "schema": "use type 'json_schema', with name and schema",
}
OF_JSON_SCHEMAS: Final[Mapping[str, str]] = {"properties": "put the whole schema into schema"}

OF_RESPONSES: Final[Mapping[str, str]] = {
    "access_programs": "this server runs no programs",
    "background_options": "responses never run in the background",
    "best_of": "a response has one output",
    "chat_template": _WORKERS_TEMPLATE,
    "context_management": "nothing of the context is removed; send a shorter input",
    "conversation": "use previous_response_id",
    "documents": "send them in the input",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_choice": _TEXT_FORMAT,
    "guided_grammar": _TEXT_FORMAT,
    "guided_json": _TEXT_FORMAT,
    "guided_regex": _TEXT_FORMAT,
    "image": "only text is generated",
    "max_completion_tokens": "use max_output_tokens",
    "messages": "use input",
    "moderation": "nothing is moderated",
    "output_config": "use text.format and reasoning.effort",
    "output_format": _TEXT_FORMAT,
    "prompt": "there are no stored prompts; use instructions and input",
    "reasoning_effort": "use reasoning.effort",
    "response_format": _TEXT_FORMAT,
    "structured_outputs": _TEXT_FORMAT,
    "system": "use instructions",
    "truncate_prompt_tokens": _NO_CUT,
}

OF_MESSAGES: Final[Mapping[str, str]] = {
    "best_of": "a message has one content",
    "chat_template": _WORKERS_TEMPLATE,
    "compaction": "nothing of the context is removed; send fewer messages",
    "conversation": _NO_CONVERSATION,
    "documents": "send them in a message",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_choice": _OUTPUT_FORMAT,
    "guided_grammar": _OUTPUT_FORMAT,
    "guided_json": _OUTPUT_FORMAT,
    "guided_regex": _OUTPUT_FORMAT,
    "input": "use messages",
    "instructions": "use system",
    "max_completion_tokens": _LENGTH,
    "max_output_tokens": _LENGTH,
    "output_format": _OUTPUT_FORMAT,
    "parallel_tool_calls": "use tool_choice.disable_parallel_tool_use",
    "previous_response_id": f"{_NO_CONVERSATION}, or use /v1/responses",
    "prompt": "use messages",
    "reasoning_effort": "use output_config.effort",
    "response_format": _OUTPUT_FORMAT,
    "structured_outputs": _OUTPUT_FORMAT,
    "text": _OUTPUT_FORMAT,
    "thread": "no conversation is kept; send all messages",
    "truncate_prompt_tokens": _NO_CUT,
}

# As `NEUTRAL`, for fields that only some endpoints reject.
_NEUTRAL_OF_SOME: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": ({},),
    "best_of": (1,),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    # Without functions, these values choose nothing.
    "function_call": ("auto", "none"),
    "functions": ([],),
    "instructions": ("",),
    "output_config": ({},),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "system": ("", []),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
}


# The members for which these objects are rejected, see `RequestModel.unsupported_members`. Gateways
# that translate requests of Claude Code, such as LiteLLM, also send its `output_config`, which has
# only an effort. It is then ignored and named, as other fields of reasoning are.
MEMBERS: Final[Mapping[str, str]] = {"output_config": "format", "text": "format"}


def neutral(rejected: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Return the values with which an endpoint accepts fields that it otherwise rejects.

    `rejected`: the names of the fields. `NEUTRAL` has the values that all endpoints accept.
    """
    return {name: _NEUTRAL_OF_SOME[name] for name in rejected if name in _NEUTRAL_OF_SOME}


OF_NVEXT: Final[Mapping[str, str]] = {
    "annotations": "responses have no annotations; use extra_fields",
    "backend_instance_id": "the router chooses the worker",
    "greed_sampling": "use temperature 0",
    "max_thinking_tokens": "reasoning has no limit of its own; use reasoning_effort",
    "token_data": "send token ids to /v1/completions",
    "use_raw_prompt": "use /v1/completions",
}
