"""Which records stand for an instance, and why another does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamo_trtllm.cluster.discovery.records import (
    MAX_RECORD_BYTES,
    BadRecord,
    EndpointId,
    check_model_name,
    instance_key,
    read_instance,
    subject,
    written,
)
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import (
    MAX_VOCABULARY,
    WIRE_VERSION,
    Instance,
    Limits,
    Role,
    SamplingDefaults,
    encode,
)
from tests.kit.cases import each_case
from tests.kit.instances import CARD, LAYOUT, make_instance

ONE = make_instance(1)
KEY, RECORD = written(ONE)
SHA256 = "0" * 64
replace = msgspec.structs.replace


def with_card(**fields: Any) -> Instance:
    return replace(ONE, card=replace(CARD, **fields))


def with_layout(**fields: Any) -> Instance:
    return replace(ONE, layout=replace(LAYOUT, **fields))


def with_limits(**fields: Any) -> Instance:
    return replace(ONE, limits=Limits(**fields))


def named(name: str) -> tuple[str, Instance]:
    """An instance whose key, fields and subject all agree on an endpoint of this name."""
    endpoint = EndpointId("dynamo", "prefill", name)
    instance = replace(ONE, component="prefill", endpoint=name, subject=subject(endpoint, 1))
    return instance_key(endpoint, 1), instance


def reason(key: str, record: bytes) -> str:
    with pytest.raises(BadRecord) as caught:
        read_instance(key, record)
    return str(caught.value)


@each_case(
    "instance",
    [
        ONE,
        make_instance(0),
        make_instance((1 << 63) - 1, role=Role.PREFILL),
        replace(ONE, version="", kv_compat={"model_folder": "/" + "x" * 4000, "release": ""}),
        replace(ONE, engine="another", strategy="of_a_newer_version"),
        with_card(renderer="of.a-newer_version2", tool_call_parser="x", name="org/Modèle 7B (β)"),
        with_card(context_length=1, vocab_size=MAX_VOCABULARY, eos_token_ids=()),
        with_card(eos_token_ids=(0, 31)),
        with_card(files={"tokenizer.json": SHA256, "..x": "f" * 64}),
        with_limits(max_batch_size=2048, max_num_tokens=1 << 20, kv_blocks=1 << 24),
    ],
)
def test_record_when_sound_then_its_instance(instance: Instance) -> None:
    assert read_instance(*written(instance)) == instance


def test_record_fields_of_newer_version_are_skipped() -> None:
    fields = msgspec.msgpack.decode(RECORD)
    fields["card"]["later"] = [1]
    assert read_instance(KEY, msgspec.msgpack.encode(fields | {"later": {"a": 1}})) == ONE


@each_case(
    "key",
    [
        "",
        "v1/instances/dynamo/odd",
        KEY + "/more",
        KEY.replace("v1/", "v2/"),
        KEY[:-1] + "0x1",
        KEY[:-1] + "01",
        KEY[:-1] + "-1",
        KEY[:-1] + "A",
        KEY[:-1] + "1" * 17,
        KEY[:-1] + "\udcff",
        KEY[:-1],
    ],
)
def test_record_when_its_key_is_not_an_instances_then_rejected(key: str) -> None:
    assert (
        reason(key, RECORD)
        == "the key is not of the form v1/instances/NAMESPACE/COMPONENT/ENDPOINT/ID"
    )


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (KEY[:-1] + "aaaa", "id is aaaa in the key and 1 in the record"),
        (
            KEY.replace("dynamo", "green"),
            "namespace is 'green' in the key and 'dynamo' in the record",
        ),
        (
            KEY.replace("tensorrt_llm", "prefill"),
            "component is 'prefill' in the key and 'tensorrt_llm' in the record",
        ),
        (
            KEY.replace("generate", "x\udcff"),
            r"endpoint is 'x\udcff' in the key and 'generate' in the record",
        ),
    ],
)
def test_record_of_another_key_is_rejected_with_both(key: str, said: str) -> None:
    assert reason(key, RECORD) == said


@each_case(
    "name", ["", "a.b", "a*", "a>", "a b", "a\tb", "a\x1b[2J", "a\u2028b", "a\x00", "x" * 257]
)
def test_record_with_unsafe_name_is_rejected(name: str) -> None:
    key, instance = named(name)
    said = reason(key, encode(instance))
    assert said.startswith("endpoint: name ")
    assert said.isprintable()


@each_case(
    ("instance", "said"),
    [
        (
            replace(ONE, subject="dynamo_tensorrt_llm.generate-2"),
            "must have dynamo_tensorrt_llm.generate-1",
        ),
        (replace(ONE, subject=""), "subject is ''"),
        (replace(ONE, engine=""), "engine is ''"),
        (replace(ONE, engine="x" * 65), "engine is"),
        (replace(ONE, engine="a\nb"), r"engine is 'a\nb'"),
        (replace(ONE, strategy="two words"), "strategy is 'two words'"),
        (replace(ONE, version="x" * 257), "version"),
        (replace(ONE, version="1\x1b[2J"), "version"),
        (replace(ONE, kv_compat={str(i): "" for i in range(65)}), "pairing has 65 entries"),
        (replace(ONE, kv_compat={"": "x"}), "a name in pairing ''"),
        (replace(ONE, kv_compat={"a": "x" * 4097}), "pairing.a"),
        (replace(ONE, kv_compat={"a": "x\r"}), "pairing.a 'x\\r' has control characters"),
        (with_layout(dtype=""), "layout.dtype is ''"),
        (with_layout(block_tokens=0), "`int` >= 1 - at `$.layout.block_tokens`"),
        (with_layout(num_layers=-1), "$.layout.num_layers"),
        (with_layout(num_kv_heads=1 << 31), "`int` <= 2147483647 - at `$.layout.num_kv_heads`"),
        (with_layout(head_dim=0), "$.layout.head_dim"),
        (with_layout(tensor_parallel_size=0), "$.layout.tensor_parallel_size"),
        (with_limits(max_batch_size=-1), "$.limits.max_batch_size"),
        (with_limits(max_num_tokens=-1), "$.limits.max_num_tokens"),
        (with_limits(kv_blocks=-1), "$.limits.kv_blocks"),
        (with_card(name=""), "card.name '' has 0 characters"),
        (with_card(name="x" * 257), "has 257 characters; it must have 1 to 256"),
        (
            with_card(name="a\nERROR all is lost"),
            "card.name 'a\\nERROR all is lost' has control characters",
        ),
        (with_card(name="a\u2028b"), "has control characters"),
        (with_card(context_length=0), "$.card.context_length"),
        (with_card(context_length=-5), "$.card.context_length"),
        (with_card(vocab_size=0, eos_token_ids=()), "`int` >= 1 - at `$.card.vocab_size`"),
        (with_card(vocab_size=MAX_VOCABULARY + 1), "`int` <= 16777216 - at `$.card.vocab_size`"),
        (
            with_card(eos_token_ids=(2, 32)),
            "card.eos_token_ids contains 32; the vocabulary has 32 tokens",
        ),
        (with_card(eos_token_ids=(-1,)), "$.card.eos_token_ids"),
        (with_card(eos_token_ids=(1,) * 1025), "card.eos_token_ids has 1025 entries"),
        (with_card(renderer=""), "card.renderer is ''"),
        (with_card(renderer="a/../b"), "card.renderer is 'a/../b'"),
        (with_card(reasoning_parser="x" * 65), "card.reasoning_parser is"),
        (with_card(tool_call_parser="a\x00"), "card.tool_call_parser is"),
        (with_card(unsupported_features=("x",) * 257), "card.refuses has 257 entries"),
        (with_card(unsupported_features=("\n",)), "a name in card.refuses"),
        (
            with_card(sampling_defaults=SamplingDefaults(temperature=3.0)),
            "$.card.sampling_defaults.temperature",
        ),
        (with_card(sampling_defaults=SamplingDefaults(top_k=-2)), "$.card.sampling_defaults.top_k"),
        (
            with_card(sampling_defaults=SamplingDefaults(min_p=float("nan"))),
            "$.card.sampling_defaults.min_p",
        ),
        (with_card(files={"a/b": SHA256}), "file name 'a/b' must be a plain name"),
        (with_card(files={"a\\b": SHA256}), "must be a plain name"),
        (with_card(files={"..": SHA256}), "file name '..' must be a plain name"),
        (with_card(files={"": SHA256}), "a file name ''"),
        (with_card(files={"x" * 256: SHA256}), "has 256 characters"),
        (with_card(files={"a": "0" * 63}), "it must be 64 hex digits"),
        (with_card(files={"a": "G" * 64}), "it must be 64 hex digits"),
        (with_card(files={str(i): SHA256 for i in range(33)}), "card.files has 33 entries"),
    ],
)
def test_record_with_unsound_field_is_rejected_by_name(instance: Instance, said: str) -> None:
    found = reason(KEY, encode(instance))
    assert said in found
    assert len(found) < 500
    assert found.isprintable()


def test_record_when_its_id_has_64_bits_then_rejected() -> None:
    instance = make_instance(1 << 63)
    key = instance_key(EndpointId("dynamo", "tensorrt_llm", "generate"), 1 << 63)
    assert "`$.id`" in reason(key, encode(instance))


def raw(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.decode(RECORD) | fields)


@each_case(
    ("record", "said"),
    [
        (b"", "can't be read"),
        (b"\xc1", "can't be read"),
        (RECORD[:-1], "truncated"),
        (raw(role="overlord"), "overlord"),
        (raw(role="x\n" * 5000), r"x\nx\n"),
        (raw(id="1"), "$.id"),
        (raw(id=-1), "$.id"),
        (raw(card=None), "$.card"),
        (b"\x81\xa5later" + b"\x91" * 100_000 + b"\xc0", "recursion"),
        (raw(later="x" * MAX_RECORD_BYTES), f"the limit is {MAX_RECORD_BYTES}"),
    ],
)
def test_record_that_is_no_instance_is_rejected_briefly(record: bytes, said: str) -> None:
    found = reason(KEY, record)
    assert said in found
    assert len(found) < 500
    assert found.isprintable()


def test_written_record_that_readers_reject_is_config_error() -> None:
    with pytest.raises(ConfigError, match=r"can't register.*\$\.card\.vocab_size"):
        written(with_card(vocab_size=0))


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb"])
def test_model_name_that_frontends_reject_names_the_flag(name: str) -> None:
    check_model_name("org/model 7B")
    with pytest.raises(ConfigError, match="--served-model-name") as caught:
        check_model_name(name)
    assert caught.value.field == "served_model_name"


@pytest.mark.parametrize("wire", [WIRE_VERSION - 1, WIRE_VERSION, WIRE_VERSION + 1])
def test_record_of_neighbor_version_gives_its_instance(wire: int) -> None:
    instance = replace(ONE, wire=wire)
    assert read_instance(*written(instance)) == instance


def test_record_of_distant_version_names_both_versions() -> None:
    record = encode(replace(ONE, wire=WIRE_VERSION + 2))
    assert reason(KEY, record).startswith(
        f"wire versions {WIRE_VERSION + 2} (peer) and {WIRE_VERSION} (this process)"
    )
