"""The custom resources of our recipes, as far as they use them: read off the projects' API
references.

LeaderWorkerSet: lws.sigs.k8s.io/docs/reference, leaderworkerset.x-k8s.io/v1. ScaledObject:
keda.sh/docs/2.17, its specification and the Prometheus scaler. PodMonitor and PrometheusRule:
prometheus-operator.dev/docs/api-reference, v1 of them.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _object(required: str, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


_TEXT: Schema = {"type": "string", "minLength": 1}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_ANY: Schema = {"type": "object"}
_METADATA = _object("name", name=_TEXT, labels=_ANY)
_POD = _object("spec metadata", metadata=_ANY, spec=_ANY)


def _resource(api: str, kind: str, spec: Schema) -> Schema:
    top = {
        "apiVersion": {"const": api},
        "kind": {"const": kind},
        "metadata": _METADATA,
        "spec": spec,
    }
    return _object("apiVersion kind metadata spec", **top)


_LEADER_WORKER_SET = _object(
    "leaderWorkerTemplate",
    replicas=_COUNT,
    startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
    leaderWorkerTemplate=_object(
        "workerTemplate",
        leaderTemplate=_POD,
        workerTemplate=_POD,
        size={"type": "integer", "minimum": 1},
        restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "None"]},
    ),
)

_SCALED_OBJECT = _object(
    "scaleTargetRef triggers",
    scaleTargetRef=_object("name", apiVersion=_TEXT, kind=_TEXT, name=_TEXT),
    minReplicaCount=_COUNT,
    maxReplicaCount=_COUNT,
    pollingInterval=_COUNT,
    advanced=_object("", horizontalPodAutoscalerConfig=_object("", behavior=_ANY)),
    triggers={
        "type": "array",
        "minItems": 1,
        "items": _object(
            "type metadata",
            type={"const": "prometheus"},
            metricType={"enum": ["AverageValue", "Value"]},
            metadata=_object(
                "serverAddress query threshold",
                serverAddress=_TEXT,
                query=_TEXT,
                threshold=_TEXT,
                ignoreNullValues={"enum": ["true", "false"]},
            ),
        ),
    },
)

_POD_MONITOR = _object(
    "selector podMetricsEndpoints",
    selector=_object("", matchLabels=_ANY, matchExpressions={"type": "array"}),
    podMetricsEndpoints={
        "type": "array",
        "items": _object(
            "port",
            port=_TEXT,
            path=_TEXT,
            interval={"type": "string", "pattern": "^[0-9]+s$"},
            relabelings={
                "type": "array",
                "items": _object(
                    "", sourceLabels={"type": "array", "items": _TEXT}, targetLabel=_TEXT
                ),
            },
        ),
    },
)

_PROMETHEUS_RULE = _object(
    "groups",
    groups={
        "type": "array",
        "items": _object(
            "name rules",
            name=_TEXT,
            rules={
                "type": "array",
                "minItems": 1,
                "items": _object(
                    "alert expr",
                    alert=_TEXT,
                    expr=_TEXT,
                    **{"for": {"type": "string", "pattern": "^[0-9]+[smh]$"}},
                ),
            },
        ),
    },
)

SCHEMAS: dict[str, Schema] = {
    "LeaderWorkerSet": _resource(
        "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", _LEADER_WORKER_SET
    ),
    "ScaledObject": _resource("keda.sh/v1alpha1", "ScaledObject", _SCALED_OBJECT),
    "PrometheusRule": _resource("monitoring.coreos.com/v1", "PrometheusRule", _PROMETHEUS_RULE),
    "PodMonitor": _resource("monitoring.coreos.com/v1", "PodMonitor", _POD_MONITOR),
}
