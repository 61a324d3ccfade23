"""The grammar of etcd keys and request-plane subjects, both ways. Pure; the only place that spells them."""

from __future__ import annotations

from typing import NamedTuple

from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.messages import Instance

PREFIX = "v1/instances"


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
    if not name or any(c in "/.*> \t\r\n" for c in name):
        raise ConfigError(f"name {name!r} may not be empty or hold '/', '.', '*', '>' or white space")


def endpoint_of(instance: Instance) -> EndpointId:
    return EndpointId(instance.namespace, instance.component, instance.endpoint)


def namespace_prefix(namespace: str) -> str:
    """All instances of a namespace lie under this key prefix."""
    return f"{PREFIX}/{namespace}/"


def instance_key(endpoint_id: EndpointId, instance_id: int) -> str:
    return f"{PREFIX}/{endpoint_id.namespace}/{endpoint_id.component}/{endpoint_id.endpoint}/{instance_id:x}"


def instance_id_of(key: str) -> int:
    """The instance id in a key. Raises ValueError for a key that is not an instance's."""
    parts = key.split("/")
    if len(parts) != 6 or f"{parts[0]}/{parts[1]}" != PREFIX:
        raise ValueError(f"{key!r} is not an instance key")
    return int(parts[5], 16)


def subject(endpoint_id: EndpointId, instance_id: int) -> str:
    """Request-plane address of one instance, spelled as in the guides: `dynamo_backend.generate-694d997dbae9a315`."""
    return f"{endpoint_id.namespace}_{endpoint_id.component}.{endpoint_id.endpoint}-{instance_id:x}"
