"""The grammar of etcd keys and request-plane subjects, both ways. Pure; the only place that spells them."""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.messages import Instance

PREFIX = "v1/instances"
MOST_NAME_CHARACTERS = 256
_BREAKS_A_NAME = re.compile(r"[/.*>\s\x00-\x1f\x7f-\x9f]")
_ID = re.compile(r"0|[1-9a-f][0-9a-f]{0,15}")  # as `instance_key` writes it, so that one id has one key
_SHOWN_CHARACTERS = 256
_SHOWN_HEAD = 200


class EndpointId(NamedTuple):
    """A callable name of a role-group in a deployment."""

    namespace: str
    component: str
    endpoint: str

    def __str__(self) -> str:
        return f"dyn://{self.namespace}.{self.component}.{self.endpoint}"


def parse_endpoint(text: str) -> EndpointId:
    """`dyn://namespace.component.endpoint`, as in the guides. Raises ConfigError."""
    parts = text.removeprefix("dyn://").split(".")
    if not text.startswith("dyn://") or len(parts) != 3 or not all(parts):
        raise ConfigError(f"endpoint {text!r} is not of the form dyn://NAMESPACE.COMPONENT.ENDPOINT", field="endpoint")
    for part in parts:
        check_name(part)
    return EndpointId(*parts)


def check_name(name: str) -> None:
    """Names become parts of keys and subjects. Raises ConfigError for one that would break them."""
    if not name or _BREAKS_A_NAME.search(name):
        raise ConfigError(
            f"name {name!r} must not be empty or contain '/', '.', '*', '>', white space or control characters"
        )
    if len(name) > MOST_NAME_CHARACTERS:
        raise ConfigError(f"name {name[:32]!r}... has {len(name)} characters; use at most {MOST_NAME_CHARACTERS}")


def endpoint_of(instance: Instance) -> EndpointId:
    return EndpointId(instance.namespace, instance.component, instance.endpoint)


def namespace_prefix(namespace: str) -> str:
    """All instances of a namespace lie under this key prefix."""
    return f"{PREFIX}/{namespace}/"


def instance_key(endpoint_id: EndpointId, instance_id: int) -> str:
    return f"{PREFIX}/{endpoint_id.namespace}/{endpoint_id.component}/{endpoint_id.endpoint}/{instance_id:x}"


def parse_instance_key(key: str) -> tuple[EndpointId, int]:
    """Reads the endpoint and the instance id in a key. Raises ValueError for a key that `instance_key` never writes."""
    parts = key.split("/")
    if len(parts) != 6 or f"{parts[0]}/{parts[1]}" != PREFIX or not _ID.fullmatch(parts[5]):
        raise ValueError(f"{shown_key(key)} is not an instance key")
    return EndpointId(*parts[2:5]), int(parts[5], 16)


def instance_id_of(key: str) -> int:
    """The instance id in a key. Raises ValueError for a key that is not an instance's."""
    return parse_instance_key(key)[1]


def shown_key(key: str) -> str:
    """Escape a key like `repr` and bound its length. A shortened key ends in its hash, so that similar keys differ."""
    text = repr(key[: _SHOWN_CHARACTERS + 1])[1:-1]
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{text[:_SHOWN_HEAD]}... ({len(key)} characters, sha256 {digest[:16]})"


def subject(endpoint_id: EndpointId, instance_id: int) -> str:
    """Return the request-plane address of one instance, e.g. `dynamo_backend.generate-694d997dbae9a315` (as Dynamo)."""
    return f"{endpoint_id.namespace}_{endpoint_id.component}.{endpoint_id.endpoint}-{instance_id:x}"
