"""Encode instance records and their keys, and validate them.

Any client of etcd can write records, so they are checked. The types of numbers check the ranges of
numbers. All other checks are in this module. A record that fails a check is rejected. Unknown
fields are ignored. Unknown names of renderers and parsers are accepted here, because the frontend
checks them when it uses them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from typing import Final, NamedTuple

import msgspec

from dynamo_trtllm.config.config_base import NAME, NAME_RULE
from dynamo_trtllm.protocol.errors import BadFrame, ConfigError
from dynamo_trtllm.protocol.messages import (
    Instance,
    ModelDeploymentCard,
    Role,
    decode,
    encode,
    wire_mismatch,
)

PREFIX: Final = "v1/instances"  # prefix of the keys
MAX_RECORD_BYTES: Final = 256 << 10
MAX_MODEL_NAME_CHARACTERS: Final = 256
_MAX_EOS_IDS: Final = 1024
_MAX_FILES: Final = 32
_MAX_PAIRING: Final = 64
_MAX_FEATURES: Final = 256
# These are the most characters of a text.
_SHORT: Final = 64  # of a kind, such as "torch" or "bfloat16"
_LONG: Final = 256  # of another name, or of a version
_PATH: Final = 4096  # of a value in `kv_compat`, such as the folder of the model
_MAX_FILE_NAME: Final = 255
_SHOWN: Final = 80  # of a value in a reason
_MAX_REASON: Final = 400  # of a reason
_SHOWN_CHARACTERS: Final = 256  # of a key in a message
_SHOWN_HEAD: Final = 200  # of the beginning of a longer key, before its hash

# Leading zeros are not allowed, so that each id has only one key.
_ID = re.compile(r"0|[1-9a-f][0-9a-f]{0,15}")
# A log line with one of these characters may become two lines.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_KIND = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{_SHORT - 1}}}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class EndpointId(NamedTuple):
    """The name of an endpoint in a deployment. All workers of a role share it."""

    namespace: str
    component: str
    endpoint: str

    def __str__(self) -> str:
        return f"dyn://{self.namespace}.{self.component}.{self.endpoint}"


def parse_endpoint(text: str) -> EndpointId:
    """Parse `dyn://namespace.component.endpoint`, the value of `--endpoint`, as NVIDIA Dynamo."""
    return EndpointId(*text.removeprefix("dyn://").split("."))


def endpoint_of(instance: Instance) -> EndpointId:
    """Return the endpoint of an instance."""
    return EndpointId(instance.namespace, instance.component, instance.endpoint)


def namespace_prefix(namespace: str) -> str:
    """Return the key prefix of all instances of a namespace."""
    return f"{PREFIX}/{namespace}/"


def instance_key(endpoint_id: EndpointId, instance_id: int) -> str:
    """Return the etcd key of an instance."""
    path = f"{endpoint_id.namespace}/{endpoint_id.component}/{endpoint_id.endpoint}"
    return f"{PREFIX}/{path}/{instance_id:x}"


def parse_instance_key(key: str) -> tuple[EndpointId, int]:
    """Return the endpoint and the instance id of a key.

    Raises:
        ValueError: the key does not have the form of `instance_key`.
    """
    parts = key.split("/")
    if len(parts) != 6 or f"{parts[0]}/{parts[1]}" != PREFIX or not _ID.fullmatch(parts[5]):
        raise ValueError(f"{shown_key(key)} is not an instance key")
    return EndpointId(*parts[2:5]), int(parts[5], 16)


def shown_key(key: str) -> str:
    """Return a key escaped like `repr` and shortened.

    A shortened key ends with its hash, so that it differs from other shortened keys.
    """
    # Leave out the quotes of `repr`. One character more than is shown reveals a longer key.
    text = repr(key[: _SHOWN_CHARACTERS + 1])[1:-1]
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{text[:_SHOWN_HEAD]}... ({len(key)} characters, sha256 {digest[:16]})"


def subject(endpoint_id: EndpointId, instance_id: int) -> str:
    """Return the request-plane subject of an instance.

    It has Dynamo's form, such as `dynamo_backend.generate-694d997dbae9a315`.
    """
    return f"{endpoint_id.namespace}_{endpoint_id.component}.{endpoint_id.endpoint}-{instance_id:x}"


class BadRecord(Exception):
    """A record is invalid. The message is shortened and has no control characters."""

    def __init__(self, reason: str) -> None:
        escaped = _CONTROL.sub(_escape, reason[: _MAX_REASON + 1])
        if len(escaped) > _MAX_REASON:
            escaped = f"{escaped[:_MAX_REASON]}..."
        super().__init__(escaped)


def _escape(match: re.Match[str]) -> str:
    return repr(match.group())[1:-1]


def read_instance(key: str, record: bytes) -> Instance:
    """Decode and validate an instance record.

    Raises:
        BadRecord: the record is invalid, or does not belong to this key.
    """
    try:
        endpoint, instance_id = parse_instance_key(key)
    except ValueError as exc:
        raise BadRecord(
            f"the key is not of the form {PREFIX}/NAMESPACE/COMPONENT/ENDPOINT/ID"
        ) from exc
    if len(record) > MAX_RECORD_BYTES:
        raise BadRecord(f"the record has {len(record)} bytes; the limit is {MAX_RECORD_BYTES}")
    try:
        instance = decode(record, Instance)
    except BadFrame as exc:
        raise BadRecord(f"the record can't be read: {exc.message}") from exc
    mismatch = wire_mismatch(instance.wire)
    if mismatch:
        raise BadRecord(mismatch)
    _check_place(instance, endpoint, instance_id)
    _check_kinds(instance)
    _check_card(instance.card)
    return _with_role(instance)


def _with_role(instance: Instance) -> Instance:
    """Return a decoded instance with its role. The record of an elastic worker has another role.

    Raises:
        BadRecord: the instance can't be elastic.
    """
    if instance.role is Role.ELASTIC:
        raise BadRecord("role is elastic; a record of an elastic worker has the field elastic")
    if not instance.is_elastic:
        return instance
    if not instance.can_aggregate:
        raise BadRecord("elastic is true, but serves_whole is false; elastic workers need both")
    problem = instance.shares.problem
    if problem:
        raise BadRecord(f"shares: {problem}")
    return msgspec.structs.replace(instance, role=Role.ELASTIC)


def _in_record(instance: Instance) -> Instance:
    """Return an instance as it is written.

    Frontends of earlier versions do not know the role of elastic workers. They take such a worker
    for an aggregated worker.
    """
    if instance.role is not Role.ELASTIC:
        return instance
    return msgspec.structs.replace(instance, role=Role.AGGREGATED, is_elastic=True)


def written(instance: Instance) -> tuple[str, bytes]:
    """Return key and encoded record of an instance.

    Raises:
        ConfigError: frontends would reject the record.
    """
    key = instance_key(endpoint_of(instance), instance.id)
    record = encode(_in_record(instance))
    try:
        read_instance(key, record)
    except BadRecord as exc:
        raise ConfigError(
            f"this worker can't register because frontends would reject its record: {exc}; fix this"
            " value and restart the worker"
        ) from exc
    return key, record


def check_model_name(name: str) -> None:
    """Check the served model name, before the model is loaded.

    Raises:
        ConfigError: frontends would reject the name.
    """
    try:
        _check_text("the served model name", name, most=MAX_MODEL_NAME_CHARACTERS)
    except BadRecord as exc:
        raise ConfigError(
            f"{exc}; pass another --served-model-name", field="served_model_name"
        ) from exc


def _check_place(instance: Instance, endpoint: EndpointId, instance_id: int) -> None:
    """Check that id, endpoint and subject of an instance match the key of its record."""
    if instance.id != instance_id:
        raise BadRecord(f"id is {instance_id:x} in the key and {instance.id:x} in the record")
    own = endpoint_of(instance)
    for field, expected, actual in zip(own._fields, endpoint, own, strict=True):
        if actual != expected:
            raise BadRecord(
                f"{field} is {_shown(expected)} in the key and {_shown(actual)} in the record"
            )
        if not re.fullmatch(NAME, actual):
            raise BadRecord(f"{field}: name {_shown(actual)} must have {NAME_RULE}")
    wanted = subject(own, instance.id)
    if instance.subject != wanted:  # requests would go to a process other than this instance
        raise BadRecord(
            f"subject is {_shown(instance.subject)}; instance {instance.id:x} must have {wanted}"
        )


def _check_kinds(instance: Instance) -> None:
    _check_kind("engine", instance.engine)
    _check_kind("strategy", instance.strategy)
    _check_kind("layout.dtype", instance.layout.dtype)
    _check_text("version", instance.version, least=0, most=_LONG)
    _check_names("supported_features", instance.supported_features)
    _check_names("kv_addresses", instance.kv_addresses)
    _check_size("pairing", instance.kv_compat, _MAX_PAIRING)
    for name, value in instance.kv_compat.items():
        _check_text("a name in pairing", name, most=_LONG)
        _check_text(f"pairing.{name}", value, least=0, most=_PATH)


def _check_card(card: ModelDeploymentCard) -> None:
    _check_text("card.name", card.name, most=MAX_MODEL_NAME_CHARACTERS)
    _check_size("card.eos_token_ids", card.eos_token_ids, _MAX_EOS_IDS)
    largest = max(card.eos_token_ids, default=0)
    if card.eos_token_ids and largest >= card.vocab_size:
        raise BadRecord(
            f"card.eos_token_ids contains {largest}; the vocabulary has {card.vocab_size} tokens"
        )
    for field in ("renderer", "reasoning_parser", "tool_call_parser"):
        _check_kind(f"card.{field}", getattr(card, field))
    _check_names("card.refuses", card.unsupported_features)
    _check_size("card.files", card.files, _MAX_FILES)
    for name, sha256 in card.files.items():
        _check_text("a file name", name, most=_MAX_FILE_NAME)
        if name in (".", "..") or "/" in name or "\\" in name:
            raise BadRecord(f"file name {_shown(name)} must be a plain name without a path")
        if not _SHA256.fullmatch(sha256):
            raise BadRecord(
                f"the hash of file {_shown(name)} is {_shown(sha256)}; it must be 64 hex digits"
            )


def _check_size(field: str, values: Collection[object], most: int) -> None:
    if len(values) > most:
        raise BadRecord(f"{field} has {len(values)} entries; the limit is {most}")


def _check_names(field: str, names: Collection[str]) -> None:
    _check_size(field, names, _MAX_FEATURES)
    for name in names:
        _check_text(f"a name in {field}", name, most=_LONG)


def _check_text(field: str, value: str, *, least: int = 1, most: int) -> None:
    if not least <= len(value) <= most:
        raise BadRecord(
            f"{field} {_shown(value)} has {len(value)} characters; it must have {least} to {most}"
        )
    if _CONTROL.search(value):
        raise BadRecord(f"{field} {_shown(value)} has control characters")


def _check_kind(field: str, value: str) -> None:
    if not _KIND.fullmatch(value):
        raise BadRecord(
            f"{field} is {_shown(value)}; it must be 1 to {_SHORT} letters, digits, '_', '-' and"
            " '.', and begin with a letter or digit"
        )


def _shown(value: str) -> str:
    """Return a value quoted and shortened."""
    if len(value) <= _SHOWN:
        return repr(value)
    return f"{value[:_SHOWN]!r}..."
