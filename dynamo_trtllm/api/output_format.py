"""Define the fields for structured output of chat and text completions, under the names of OpenAI, vLLM and Dynamo."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, TypeAlias

import orjson
from pydantic import BeforeValidator, Field, model_validator

from dynamo_trtllm.api.request_model import List, RequestModel, agreed, check_size, invalid
from dynamo_trtllm.api.sampling import SamplingFields
from dynamo_trtllm.api.schemas import MAX_SCHEMA_BYTES, Schema, schema_text
from dynamo_trtllm.messages import OutputFormat

ANY_OBJECT: Final = "{}"  # the schema that engines take for "any object"
MAX_WORDS: Final = 1024
_META: Final = re.compile(r"[][\\.^$*+?{}()|]")


def _parsed(value: Any) -> Any:
    """Return a schema that is sent as text, as vLLM allows, as an object, and any other value unchanged."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_SCHEMA_BYTES:
        invalid(f"may have {MAX_SCHEMA_BYTES} characters at most, not {len(value)}")
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        invalid("is a text that is not valid JSON")


Pattern = Annotated[str, Field(min_length=1, max_length=MAX_SCHEMA_BYTES)]
JsonSent: TypeAlias = Schema | Annotated[str, Field(max_length=MAX_SCHEMA_BYTES)]
Json = Annotated[Schema, BeforeValidator(_parsed, json_schema_input_type=JsonSent)]
Word = Annotated[str, Field(min_length=1, max_length=1000)]
Words = Annotated[
    List[Word],
    Field(min_length=1, max_length=MAX_WORDS, description=f"At most {MAX_SCHEMA_BYTES} bytes of JSON together."),
    BeforeValidator(lambda words: check_size(words, MAX_SCHEMA_BYTES)),
]


class StructuredOutputs(RequestModel):
    """The `structured_outputs` object of vLLM. One of its formats must be given."""

    no_ops: ClassVar = {
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "disable_fallback": (True, False),  # there is one backend
    }
    unsupported: ClassVar = frozenset({"structural_tag", "whitespace_pattern"})

    json_: Json | None = Field(None, alias="json")
    regex: Pattern | None = None
    choice: Words | None = None
    grammar: Pattern | None = None
    json_object: bool = False

    @model_validator(mode="after")
    def _has_one_format(self) -> StructuredOutputs:
        if len(self.formats()) != 1:
            invalid("must have exactly one of json, regex, choice, grammar and json_object")
        return self

    def formats(self) -> dict[str, OutputFormat]:
        """Return the formats that are given, by field."""
        any_object = {"json_object": OutputFormat(json_schema=ANY_OBJECT)} if self.json_object else {}
        return any_object | formats_of(self.json_, self.regex, self.choice, self.grammar)


def formats_of(
    json: Mapping[str, Any] | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> dict[str, OutputFormat]:
    """Return the formats that are not None, by kind."""
    formats = {
        "json": None if json is None else OutputFormat(json_schema=schema_text(dict(json))),
        "regex": None if regex is None else OutputFormat(json_schema="", regex=regex),
        "choice": None if choice is None else OutputFormat(json_schema="", regex=_one_of(choice)),
        "grammar": None if grammar is None else OutputFormat(json_schema="", grammar=grammar),
    }
    return {kind: output for kind, output in formats.items() if output is not None}


def _one_of(texts: list[str]) -> str:
    """Return a regular expression that matches exactly these texts, in the syntax that all engines share."""
    return "|".join(_META.sub(r"\\\g<0>", text) for text in texts)


class StructuredFields(SamplingFields):
    """The fields of chat and text completions: `SamplingFields`, and those for structured output."""

    hints: ClassVar = SamplingFields.hints | {"guided_decoding_backend"}
    unsupported: ClassVar = frozenset({"guided_whitespace_pattern"})

    structured_outputs: StructuredOutputs | None = None
    guided_json: Json | None = None
    guided_regex: Pattern | None = None
    guided_choice: Words | None = None
    guided_grammar: Pattern | None = None

    @model_validator(mode="after")
    def _formats_agree(self) -> StructuredFields:
        agreed(self.output_formats())
        return self

    def output_formats(self) -> dict[str, OutputFormat]:
        """Return the formats that the output must follow, by the client's path. All of them are equal."""
        guided = formats_of(self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        formats = {f"guided_{kind}": output for kind, output in guided.items()}
        if self.structured_outputs is not None:
            formats |= {f"structured_outputs.{kind}": each for kind, each in self.structured_outputs.formats().items()}
        return formats
