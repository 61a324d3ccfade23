"""Models with a tokenizer.json: their template, their tokens, their text."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from dynamo_trtllm.frontend.tokenization.conversation import Conversation, Message, Tool, ToolCall
from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.frontend.tokenization.output import OutputParser
from dynamo_trtllm.frontend.tokenization.renderer_registry import renderer_for
from dynamo_trtllm.frontend.tokenization.template import ChatTemplateRenderer
from dynamo_trtllm.protocol.errors import ConfigError, InvalidRequest
from dynamo_trtllm.protocol.messages import ModelDeploymentCard, token_ids
from tests.kit.answer_parts import content_of
from tests.kit.cases import each_case

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "Łódź naïve 日本語 text",
    "user assistant system",
] * 5
SPECIALS = ["<s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "the quick 🧑‍🚀 fox 日本語 Łódź — 𒀀 done"


def byte_level() -> bytes:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["zażółć"])
    return tokenizer.to_str().encode()


def byte_fallback() -> bytes:
    """As Llama 2's: blanks are U+2581, a leading one is dropped, unknown characters are bytes."""
    words = ["▁the", "▁quick", "▁fox", "▁", "t", "h", "e", "f", "o", "x", "n", "d"]
    vocab = {
        piece: i
        for i, piece in enumerate(
            ["<unk>", *SPECIALS, *(f"<0x{b:02X}>" for b in range(256)), *words]
        )
    }
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    return tokenizer.to_str().encode()


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


def files(
    kind: str = "byte_level", template: str | None = CHATML, **config: object
) -> dict[str, bytes]:
    found = {"tokenizer.json": KINDS[kind](), "tokenizer_config.json": json.dumps(config).encode()}
    if template is not None:
        found["chat_template.jinja"] = template.encode()
    return found


def renderer(found: Mapping[str, bytes]) -> ChatTemplateRenderer:
    return ChatTemplateRenderer(found, stop_token_ids=(2,))


def prompt(found: Mapping[str, bytes], *messages: Message, **more: object) -> str:
    conversation = Conversation(
        messages=messages or (Message(role="user", content="the fox"),), **more
    )  # type: ignore[arg-type]
    made = renderer(found)
    return made.decode(made.render(conversation))


def streamed(parser: OutputParser, ids: list[int], step: int = 1) -> str:
    pieces = [
        content_of(parser.push(token_ids(ids[at : at + step]))) for at in range(0, len(ids), step)
    ]
    return "".join(pieces) + content_of(parser.finish())


def test_render_chatml_begins_the_turn_with_marker_tokens() -> None:
    found = files()
    conversation = Conversation(messages=(Message(role="user", content="the fox"),))
    ids = renderer(found).render(conversation)
    assert prompt(found) == "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    assert ids.tolist().count(1) == 2
    assert ids[0] == 1


@pytest.mark.parametrize("bos", ["<s>", {"content": "<s>", "lstrip": False}])
def test_render_shows_config_tokens_as_text(bos: object) -> None:
    assert (
        prompt(files(template="{{ bos_token }}{{ eos_token }}x", bos_token=bos, eos_token=None))
        == "<s>x"
    )


@each_case(
    ("template", "expected"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<b>é\'"}'),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}in{% endgeneration %}out", "inout"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ thinking }}", "True"),
        ("{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}", "x\n"),
    ],
)
def test_render_when_template_uses_a_usual_name_then_it_works(template: str, expected: str) -> None:
    message = Message(role="user", content="<b>é'")
    assert prompt(files(template=template), message, template_args={"thinking": True}) == expected


def test_render_leaves_out_a_byte_order_mark_of_the_template() -> None:
    assert prompt(files(template="\ufeff{{ messages[0].content }}")) == "the fox"


def test_render_shows_tools_as_objects() -> None:
    template = (
        "{{ tools[0].function.name }} {{ messages[0].tool_calls[0].function.arguments.x }} "
        "{{ messages[0].reasoning_content }} {{ messages[1].tool_call_id }}"
    )
    call = ToolCall(id="c1", name="f", arguments='{"x": 7}')
    messages = (
        Message(role="assistant", reasoning="hm", tool_calls=(call,)),
        Message(role="tool", tool_call_id="c1", content="1"),
    )
    assert prompt(files(template=template), *messages, tools=(Tool(name="f"),)) == "f 7 hm c1"


def test_render_uses_the_tool_template_with_tools() -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    found = files(template=None, chat_template=named)
    assert prompt(found) == "plain"
    assert prompt(found, tools=(Tool(name="f"),)) == "tools"


def test_render_when_both_templates_are_there_then_the_file_wins() -> None:
    assert prompt(files(template="file", chat_template="config")) == "file"
    assert prompt(files(template=None, chat_template="config")) == "config"


@each_case(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "rejected"),
        ("{{ missing.thing }}", "missing"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        (None, "use /v1/completions"),
    ],
)
def test_render_rejected_by_template_is_invalid(template: str | None, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        prompt(files(template=template))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "nested too deeply"),
        ("[" + "0," * 100_000 + "0]", "100001 values"),
    ],
)
def test_render_of_hostile_call_arguments_is_invalid(arguments: str, says: str) -> None:
    template = (
        "{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    )
    calls = (ToolCall(id="call-1", name="f", arguments=arguments),)
    with pytest.raises(InvalidRequest, match=says) as refused:
        prompt(files(template=template), Message(role="assistant", tool_calls=calls))
    assert refused.value.field == "messages"


LOOKS_BACK = (  # at all earlier messages for each message
    "{% for m in messages %}{% set ns = namespace(found=false) %}{% for at in range(loop.index0)"
    " %}{% if not ns.found %}{% set ns.found = true %}{% endif %}{% endfor %}{{ m.content }}{%"
    " endfor %}"
)
GROWS = (  # by each message
    "{% set ns = namespace(text='') %}{% for m in messages %}{% set ns.text = ns.text ~ m.content"
    " %}{% endfor %}{{ ns.text }}"
)
REPEATS_TOOLS = "{% for m in messages %}{{ tools | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "length", "few", "many"),
    [(LOOKS_BACK, 1, 50, 200), (GROWS, 10_000, 20, 60), (REPEATS_TOOLS, 1, 5, 200)],
)
def test_render_with_too_many_steps_is_invalid(
    template: str, length: int, few: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_trtllm.frontend.tokenization.template.MAX_TEMPLATE_STEPS", 10_000)
    made = renderer(files(template=template))
    tool = Tool(name="f", description="the " * 100_000, parameters={})
    message = Message(role="user", content="the " * length)
    with pytest.raises(
        InvalidRequest, match="takes more than 10000 steps for these messages and tools"
    ) as refused:
        made.render(Conversation(messages=(message,) * many, tools=(tool,)))
    assert refused.value.field == "messages"
    made.render(Conversation(messages=(message,) * few, tools=(tool,)))


def test_render_hides_internal_names_from_the_template() -> None:
    template = (
        "{% set ns = namespace(a='the') %}{{ ns.a }}[{{ ns.b }}{{ ns.__class__ }}{{"
        " ns._Namespace__attrs }}]"
    )
    assert prompt(files(template=template)) == "the[]"


def test_encode_of_written_special_token_stays_text() -> None:
    made = renderer(files())
    ids = made.encode("the <|im_end|> fox")
    assert not set(ids) & {0, 1, 2}
    assert made.decode(ids) == "the <|im_end|> fox"
    # the other one unharmed
    assert made.render(Conversation(messages=(Message(role="user", content="x"),)))[0] == 1


def test_encode_adds_begin_of_text_to_plain_prompts_only() -> None:
    made = renderer(files("byte_fallback", "{{ bos_token }}the", bos_token="<s>"))
    assert made.encode("the")[0] == 1
    assert (
        made.render(Conversation(messages=(Message(role="user", content="x"),))).tolist().count(1)
        == 1
    )


@pytest.mark.parametrize("kind", KINDS)
def test_encode_of_other_text_adds_no_special_token(kind: str) -> None:
    made = renderer(files(kind))
    whole = made.encode("the fox")
    bare = made.encode("the fox", is_prompt=False)
    assert made.decode(bare).strip() == "the fox"
    assert whole[len(whole) - len(bare) :] == bare
    assert len(whole) - len(bare) == (kind == "byte_fallback")  # its tokenizer adds <s>


@pytest.mark.parametrize("kind", KINDS)
def test_token_texts_then_they_are_those_of_the_vocabulary(kind: str) -> None:
    made = renderer(files(kind))
    ids = made.encode("the fox 日")
    library = tokenizers.Tokenizer.from_str(KINDS[kind]().decode())
    assert made.token_texts(ids) == [library.id_to_token(token) for token in ids]


def test_render_of_unopened_answer_ends_with_the_messages() -> None:
    ended = "<|im_start|>user\nthe fox<|im_end|>\n"
    assert prompt(files(), opens_answer=False) == ended
    assert prompt(files()) == f"{ended}<|im_start|>assistant\n"


def test_encode_replaces_a_lone_surrogate() -> None:
    made = renderer(files())
    assert made.decode(made.encode("a\ud800b")) == "a\N{REPLACEMENT CHARACTER}b"


@each_case("kind", KINDS)
@each_case("step", [1, 2, 5, 1000])
def test_text_parser_streams_all_text_without_specials(kind: str, step: int) -> None:
    made = renderer(files(kind))
    ids = made.encode(TEXT).tolist()
    assert streamed(made.text_parser(), [*ids[:5], 2, *ids[5:], 2], step) == TEXT
    assert streamed(made.chat_parser(), ids, step) == TEXT


@pytest.mark.parametrize("kind", KINDS)
def test_text_parser_shows_no_part_of_a_character(kind: str) -> None:
    made = renderer(files(kind))
    parser = made.text_parser()
    pieces = [content_of(parser.push(token_ids([i]))) for i in made.encode("the 𒀀")]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "" in pieces


@each_case("kind", KINDS)
@each_case("seed", range(10))
def test_text_parser_of_random_ids_neither_raises_nor_stalls(kind: str, seed: int) -> None:
    chance = random.Random(seed)
    made = renderer(files(kind))
    ids = [chance.randrange(300) for _ in range(300)]
    text = streamed(made.text_parser(), ids)
    assert text == streamed(made.text_parser(), ids, 300)
    assert streamed(made.text_parser(), [*ids, 2, 2, 4_000_000]) == text
    parser = made.text_parser()
    silent = longest = 0
    for token_id in ids:
        silent = 0 if content_of(parser.push(token_ids([token_id]))) else silent + 1
        longest = max(longest, silent)
    assert longest < 8


def test_text_parser_shows_an_added_token() -> None:
    made = renderer(files())
    ids = made.encode("the zażółć fox").tolist()
    assert made.decode(token_ids([max(ids)])) == "zażółć"
    assert streamed(made.text_parser(), ids) == "the zażółć fox"


@pytest.mark.parametrize("missing", ["tokenizer.json", "tokenizer_config.json"])
def test_renderer_when_a_file_is_missing_then_it_is_named(missing: str) -> None:
    found = files(template=None)
    del found[missing]
    with pytest.raises(ConfigError, match=missing):
        renderer(found)


@each_case(
    ("name", "data"),
    [
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("chat_template.jinja", b"{% if %}"),
        ("chat_template.jinja", b"\xff"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
    ],
)
def test_renderer_with_broken_file_is_config_error(name: str, data: bytes) -> None:
    with pytest.raises(ConfigError):
        renderer({**files(template=None), name: data})


def card(kind: str) -> ModelDeploymentCard:
    return ModelDeploymentCard(
        name="m", context_length=10, vocab_size=10, eos_token_ids=(2, 7), renderer=kind
    )


def test_renderer_for_when_card_names_one_then_it_is_made() -> None:
    assert isinstance(renderer_for(card("harmony"), {}), HarmonyRenderer)
    made = renderer_for(card("chat_template"), files())
    assert isinstance(made, ChatTemplateRenderer)
    assert made.stop_token_ids == (2, 7)


def test_renderer_for_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"'jinja'.*harmony and chat_template"):
        renderer_for(card("jinja"), {})


def test_render_passes_an_answer_of_only_reasoning() -> None:
    template = "{% for m in messages %}[{{ m.content }}|{{ m.reasoning_content }}]{% endfor %}"
    cut = Message(role="assistant", reasoning="why")
    assert prompt(files(template=template), cut) == "[|why]"
