"""Define what each role of process may do in NATS and etcd, and write it for these servers.

These are all subjects that this project uses, and nothing else is allowed:

| subject | who publishes | who subscribes |
|---|---|---|
| NAMESPACE_COMPONENT.ENDPOINT-ID, and the same with `.control` | frontends | that worker |
| _INBOX_frontend.> | workers: token streams, replies, heartbeats | frontends |
| _INBOX_worker.> | frontends: replies to heartbeats; a worker to itself | workers |
| _INBOX_planner.> | a planner to itself | planners |
| _INBOX_tool.> | workers and frontends: recordings; a tool to itself | tools |
| NAMESPACE.load | workers | frontends and planners |
| NAMESPACE.kv_events | workers | frontends |
| NAMESPACE.frontend_usage | frontends | frontends and planners |
| NAMESPACE.frontend_samples | frontends | frontends |
| NAMESPACE.recordings | tools and frontends: queries | workers and frontends |
| NAMESPACE.timelines.> | workers and frontends: recordings | frontends |
| $KV, $JS.API of the bucket of stored responses | frontends; tools: state, deletion | JetStream |

In etcd, a worker writes the keys of its component and reads those of its namespace. A frontend
reads the keys of its namespace, and so does a planner, which writes the table of shares and the key
of the planner that leads. Tools read all keys, and write those of their namespaces.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dynamo_trtllm.cluster.discovery.records import PREFIX, namespace_prefix
from dynamo_trtllm.cluster.discovery.share_records import planner_key, share_key
from dynamo_trtllm.cluster.request_plane.subjects import load_subject
from dynamo_trtllm.config.config_base import ClusterRole
from dynamo_trtllm.observability.recording_server import recordings_subject, timelines_prefix
from dynamo_trtllm.protocol.frontend_samples import frontend_samples_subject
from dynamo_trtllm.protocol.frontend_usage import frontend_usage_subject
from dynamo_trtllm.protocol.kv_events import kv_events_subject

# The components of workers without --endpoint: of prefill workers; of others with an engine of this
# package but vLLM; and of others with vLLM or an engine of another package.
COMPONENTS: Final = ("prefill", "tensorrt_llm", "backend")
_FRONTENDS: Final = f"_INBOX_{ClusterRole.FRONTEND}.>"
_WORKERS: Final = f"_INBOX_{ClusterRole.WORKER}.>"
_PLANNERS: Final = f"_INBOX_{ClusterRole.PLANNER}.>"
_TOOLS: Final = f"_INBOX_{ClusterRole.TOOL}.>"
_NOT_IN_BUCKETS: Final = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsPermissions:
    """The subjects that a user of NATS may use."""

    publish: Sequence[str]
    subscribe: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdPermissions:
    """The prefixes of keys that a user of etcd may use."""

    read: Sequence[str]
    read_write: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterUser:
    """A user of NATS and etcd, with the same name in both."""

    name: str
    nats: NatsPermissions
    etcd: EtcdPermissions


def bucket_of(namespace: str) -> str:
    """Return the name of the JetStream bucket of a deployment's stored responses.

    NATS allows only letters, digits, '_' and '-' in it.
    """
    plain = _NOT_IN_BUCKETS.sub("-", namespace)
    if plain != namespace:
        plain += "-" + hashlib.sha256(namespace.encode()).hexdigest()[:8]
    return f"dynamo_trtllm_responses_{plain}"


def cluster_users(
    namespaces: Sequence[str],
    *,
    components: Sequence[str] = COMPONENTS,
    own_components: Sequence[str] = (),
) -> list[ClusterUser]:
    """Return a user for each role, and one for each of `own_components`.

    Args:
        namespaces: the deployments whose processes have these users.
        components: of the workers that share a user, and can receive each other's requests.
        own_components: components with one worker, whose user is for it alone.
    """
    users = [_frontend(namespaces, [*components, *own_components])]
    if components:
        users.append(_worker(namespaces, ClusterRole.WORKER, _WORKERS, components))
    for component in own_components:
        inbox = f"{worker_inbox_prefix(component)}.>"
        users.append(_worker(namespaces, worker_user(component), inbox, [component]))
    users += [_planner(namespaces), _tool(namespaces)]
    return users


def worker_user(component: str) -> str:
    """Return the name of the user for the one worker of a component."""
    return f"{ClusterRole.WORKER}-{component}"


def worker_inbox_prefix(component: str) -> str:
    """Return --nats-inbox-prefix of the one worker of a component."""
    return f"_INBOX_{ClusterRole.WORKER}.{component}"


def _frontend(namespaces: Sequence[str], components: Sequence[str]) -> ClusterUser:
    publish = [_WORKERS, _TOOLS]
    subscribe = [_FRONTENDS]
    for namespace in namespaces:
        stream = f"KV_{bucket_of(namespace)}"
        publish += [
            *_requests(namespace, components),
            frontend_usage_subject(namespace),
            frontend_samples_subject(namespace),
            recordings_subject(namespace),
            f"{timelines_prefix(namespace)}>",
            f"$KV.{bucket_of(namespace)}.>",
            f"$JS.API.STREAM.INFO.{stream}",
            f"$JS.API.STREAM.CREATE.{stream}",
            f"$JS.API.STREAM.MSG.GET.{stream}",
            f"$JS.API.DIRECT.GET.{stream}.>",  # of a bucket that an operator has created
        ]
        subscribe += [
            *_broadcasts(namespace),
            frontend_usage_subject(namespace),
            frontend_samples_subject(namespace),
            recordings_subject(namespace),
            f"{timelines_prefix(namespace)}>",
        ]
    return ClusterUser(
        name=ClusterRole.FRONTEND,
        nats=NatsPermissions(publish=publish, subscribe=subscribe),
        etcd=EtcdPermissions(read=[namespace_prefix(name) for name in namespaces], read_write=[]),
    )


def _worker(
    namespaces: Sequence[str], name: str, inbox: str, components: Sequence[str]
) -> ClusterUser:
    publish = [_FRONTENDS, inbox, _TOOLS]
    subscribe = [inbox]
    own_keys = []
    for namespace in namespaces:
        publish += [*_broadcasts(namespace), f"{timelines_prefix(namespace)}>"]
        subscribe += [*_requests(namespace, components), recordings_subject(namespace)]
        own_keys += [f"{namespace_prefix(namespace)}{component}/" for component in components]
    return ClusterUser(
        name=name,
        nats=NatsPermissions(publish=publish, subscribe=subscribe),
        etcd=EtcdPermissions(
            read=[namespace_prefix(namespace) for namespace in namespaces], read_write=own_keys
        ),
    )


def _planner(namespaces: Sequence[str]) -> ClusterUser:
    own_keys = []
    subscribe = [_PLANNERS]
    for namespace in namespaces:
        own_keys += [share_key(namespace), planner_key(namespace)]
        subscribe += [load_subject(namespace), frontend_usage_subject(namespace)]
    return ClusterUser(
        name=ClusterRole.PLANNER,
        nats=NatsPermissions(
            publish=[_PLANNERS],
            subscribe=subscribe,
        ),
        etcd=EtcdPermissions(
            read=[namespace_prefix(namespace) for namespace in namespaces], read_write=own_keys
        ),
    )


def _tool(namespaces: Sequence[str]) -> ClusterUser:
    publish = [_TOOLS]
    for namespace in namespaces:
        stream = f"KV_{bucket_of(namespace)}"
        publish += [
            recordings_subject(namespace),
            f"$JS.API.STREAM.INFO.{stream}",
            f"$JS.API.STREAM.DELETE.{stream}",
        ]
    return ClusterUser(
        name=ClusterRole.TOOL,
        nats=NatsPermissions(publish=publish, subscribe=[_TOOLS]),
        etcd=EtcdPermissions(
            read=[f"{PREFIX}/"],  # `status` lists the namespaces that there are
            read_write=[namespace_prefix(namespace) for namespace in namespaces],
        ),
    )


def _requests(namespace: str, components: Sequence[str]) -> list[str]:
    """Return the subjects of the workers of these components, and of their control verbs."""
    return [f"{namespace}_{component}.>" for component in components]


def _broadcasts(namespace: str) -> list[str]:
    """Return the subjects at which workers publish to all frontends."""
    return [load_subject(namespace), kv_events_subject(namespace)]


def nats_configuration(users: Sequence[ClusterUser], passwords: Mapping[str, str] = {}) -> str:
    """Return the part of a configuration of nats-server that lists users.

    Args:
        users: the users.
        passwords: their passwords by name; a user without one has a certificate with CN=NAME, for
            which the server needs `verify_and_map` in its part `tls`.
    """
    lines = ["authorization {", "  users: ["]
    for user in users:
        has_password = user.name in passwords
        password = f", password: {_quote(passwords[user.name])}" if has_password else ""
        name = user.name if has_password else f"CN={user.name}"
        lines += [
            f"    {{user: {_quote(name)}{password}, permissions: {{",
            f"      publish: {{allow: [{_subject_list(user.nats.publish)}]}}",
            f"      subscribe: {{allow: [{_subject_list(user.nats.subscribe)}]}}",
            "    }}",
        ]
    return "\n".join([*lines, "  ]", "}", ""])


def _subject_list(subjects: Sequence[str]) -> str:
    """Return subjects as a list of nats-server, one a line."""
    quoted = "".join(f"\n        {_quote(subject)}" for subject in subjects)
    return f"{quoted}\n      "


def _quote(text: str) -> str:
    # nats-server knows these escapes, but not those of characters beyond ASCII.
    return json.dumps(text, ensure_ascii=False)
