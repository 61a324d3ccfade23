"""Format and parse etcd keys, endpoint names and request-plane subjects."""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from dynamo_trtllm.messages import Instance

PREFIX = "v1/instances"
_ID = re.compile(r"0|[1-9a-f][0-9a-f]{0,15}")  # no leading zeros, so that one id has one key
_SHOWN_CHARACTERS = 256
_SHOWN_HEAD = 200


class EndpointId(NamedTuple):
    """Name of an endpoint in a deployment, which all workers of a role share."""

    namespace: str
    component: str
    endpoint: str

    def __str__(self) -> str:
        return f"dyn://{self.namespace}.{self.component}.{self.endpoint}"


def parse_endpoint(text: str) -> EndpointId:
    """Parse `dyn://namespace.component.endpoint`, the format of NVIDIA Dynamo, which `--endpoint` has."""
    return EndpointId(*text.removeprefix("dyn://").split("."))


def endpoint_of(instance: Instance) -> EndpointId:
    """Return the endpoint of an instance."""
    return EndpointId(instance.namespace, instance.component, instance.endpoint)


def namespace_prefix(namespace: str) -> str:
    """Return the key prefix of all instances of a namespace."""
    return f"{PREFIX}/{namespace}/"


def instance_key(endpoint_id: EndpointId, instance_id: int) -> str:
    """Return the etcd key of an instance."""
    return f"{PREFIX}/{endpoint_id.namespace}/{endpoint_id.component}/{endpoint_id.endpoint}/{instance_id:x}"


def parse_instance_key(key: str) -> tuple[EndpointId, int]:
    """Return the endpoint and the instance id of a key. Raise ValueError if it is not a key of `instance_key`."""
    parts = key.split("/")
    if len(parts) != 6 or f"{parts[0]}/{parts[1]}" != PREFIX or not _ID.fullmatch(parts[5]):
        raise ValueError(f"{shown_key(key)} is not an instance key")
    return EndpointId(*parts[2:5]), int(parts[5], 16)


def instance_id_of(key: str) -> int:
    """Return the instance id of a key. Raise ValueError if it is not a key of `instance_key`."""
    return parse_instance_key(key)[1]


def shown_key(key: str) -> str:
    """Return a key escaped like `repr` and shortened. A shortened key ends with its hash to differ from others."""
    text = repr(key[: _SHOWN_CHARACTERS + 1])[1:-1]
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{text[:_SHOWN_HEAD]}... ({len(key)} characters, sha256 {digest[:16]})"


def subject(endpoint_id: EndpointId, instance_id: int) -> str:
    """Return the request-plane subject of an instance, e.g. `dynamo_backend.generate-694d997dbae9a315` (as Dynamo)."""
    return f"{endpoint_id.namespace}_{endpoint_id.component}.{endpoint_id.endpoint}-{instance_id:x}"
