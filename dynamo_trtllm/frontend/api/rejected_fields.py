"""List the fields of this and other APIs that would change a response if they were supported.

Ignoring such a field would give a wrong answer without a word, so it is rejected by name. Other
fields without support are ignored and named, see `unknown_fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_SAMPLER = "this sampler is not supported; use temperature, top_p, top_k and min_p"
_LENGTH = "use max_tokens"
_FORMAT = "use structured_outputs"
_NO_AUDIO = "only text is generated"

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
}

# Fields that only text completions reject.
OF_TEXT_COMPLETIONS: Final[Mapping[str, str]] = {
    "suffix": "models can't fill in the middle of a text",
    "messages": "use /v1/chat/completions",
    "tools": "use /v1/chat/completions",
}

OF_CHAT: Final[Mapping[str, str]] = {
    "audio": _NO_AUDIO,
    "best_of": "use n",
    "chat_template": "the workers set the template, with --custom-jinja-template",
    "continue_final_message": "an answer always begins a new message",
    "documents": "send them in a message",
    "echo": "an answer never contains its prompt",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "input": "use messages",
    "moderation": "nothing is moderated",
    "prompt": "use messages",
    "suffix": "models can't fill in the middle of a text",
    "system": "send a message with the role system",
}
NEUTRAL_OF_CHAT: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": ({},),
    "best_of": (1,),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("auto", "none"),  # without functions, these choose nothing
    "functions": ([],),
    "suffix": ("",),
    "system": ("",),
}

OF_ASSISTANT_MESSAGES: Final[Mapping[str, str]] = {
    "audio": _NO_AUDIO,
    "function_call": "use tool_calls",
    "prefix": "an answer always begins a new message",
    "refusal": "send it as content",
}

OF_RESPONSES: Final[Mapping[str, str]] = {
    "access_programs": "this server runs no programs",
    "background_options": "responses never run in the background",
    "context_management": "nothing of the context is removed; send a shorter input",
    "conversation": "use previous_response_id",
    "image": "only text is generated",
    "max_completion_tokens": "use max_output_tokens",
    "messages": "use input",
    "moderation": "nothing is moderated",
    "prompt": "there are no stored prompts; use instructions and input",
    "reasoning_effort": "use reasoning.effort",
    "response_format": "use text.format",
    "structured_outputs": "use text.format",
}

OF_MESSAGES: Final[Mapping[str, str]] = {
    "input": "use messages",
    "max_completion_tokens": "use max_tokens",
    "compaction": "nothing of the context is removed; send fewer messages",
    "output_format": "use output_config.format",
    "prompt": "use messages",
    "reasoning_effort": "use output_config.effort",
    "response_format": "use output_config.format",
    "structured_outputs": "use output_config.format",
    "thread": "no conversation is kept; send all messages",
}

OF_NVEXT: Final[Mapping[str, str]] = {
    "annotations": "responses have no annotations; use extra_fields",
    "backend_instance_id": "the router chooses the worker",
    "greed_sampling": "use temperature 0",
    "max_thinking_tokens": "reasoning has no limit of its own; use reasoning_effort",
    "token_data": "send token ids to /v1/completions",
    "use_raw_prompt": "use /v1/completions",
}
