"""Serve models, readiness, health, metrics and the version."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import dynamo_trtllm
from dynamo_trtllm.access.access_control import tenant_of
from dynamo_trtllm.cluster.discovery.records import endpoint_of
from dynamo_trtllm.frontend.api.response_schemas import model_object
from dynamo_trtllm.frontend.http.query import read_limit
from dynamo_trtllm.frontend.routing.model_registry import ModelRegistry
from dynamo_trtllm.observability.metrics import CONTENT_TYPE, FrontendMetrics
from dynamo_trtllm.protocol.errors import EngineNotReady
from dynamo_trtllm.protocol.http_status import retry_headers
from dynamo_trtllm.protocol.messages import Instance
from dynamo_trtllm.protocol.shares import shares_object
from dynamo_trtllm.support.http_server.exchange import HttpRequest, HttpResponse

# The most entries of each list in /health, if the query has no `limit`.
LISTED: Final = 100
MAX_LISTED: Final = 1_000_000


@dataclass(eq=False)
class StatusRoutes:
    """The status endpoints, one method per path.

    Args:
        not_ready_reason: returns the reason for which `/ready` answers 503, or None.
    """

    _models: ModelRegistry
    _metrics: FrontendMetrics
    _not_ready_reason: Callable[[], str | None]
    # Models have no creation time: the frontend's start is used.
    _created: int = field(default_factory=lambda: int(time.time()), init=False)

    async def models(self, request: HttpRequest, response: HttpResponse) -> None:
        names = self._models.names(tenant_of(request))
        cards = [self._models.get(name).card for name in names]
        data = [model_object(card, self._created) for card in cards]
        response.send_json(200, {"object": "list", "data": data})

    async def model(self, request: HttpRequest, response: HttpResponse) -> None:
        """Answer with one model, or with all if the name is empty (`/v1/models/`)."""
        name = request.path_params["name"]
        if not name:
            await self.models(request, response)
        else:
            served = self._models.get(name, tenant_of(request))
            response.send_json(200, model_object(served.card, self._created))

    async def ready(self, request: HttpRequest, response: HttpResponse) -> None:
        """Answer 200 when the model can be served now, otherwise 503 with the reason.

        The answer for an unknown model is 404.
        """
        name = request.path_params["name"]
        try:
            self._models.get(name, tenant_of(request))
            reason = self._models.not_ready_reason(name)
        except EngineNotReady as error:
            reason = error.message
        if reason:
            body = {"model": name, "status": "not_ready", "message": reason}
            response.send_json(503, body, retry_headers(503))
        else:
            response.send_json(200, {"model": name, "status": "ready"})

    async def health(self, request: HttpRequest, response: HttpResponse) -> None:
        """Always answer 200, because this process responds. The body has the deployment's status.

        Raises:
            InvalidRequest: `limit`, the most entries of a list, is out of range.
        """
        limit = read_limit(request, default=LISTED, most=MAX_LISTED)
        instances = self._models.instances()
        shown = sorted(instances[:limit], key=lambda instance: (instance.component, instance.id))
        # One instance of each endpoint.
        endpoints = {
            (instance.namespace, instance.component, instance.endpoint): instance
            for instance in instances
        }
        num_by_role = Counter(instance.role for instance in instances)
        reasons = self._models.not_ready_reasons()
        body: dict[str, Any] = {
            "status": "not_ready" if reasons else "healthy",
            "endpoints": sorted(str(endpoint_of(instance)) for instance in endpoints.values()),
            "num_instances": {str(role): count for role, count in num_by_role.items()},
            "instances": [self._row(instance) for instance in shown],
            **self._models.readiness(limit),
        }
        if reasons:
            body["message"] = "; ".join(reasons)
        response.send_json(200, body)

    def _row(self, instance: Instance) -> dict[str, Any]:
        """Return the entry of an instance in /health. An elastic worker's entry has its shares."""
        row = _instance_row(instance)
        shares = self._models.shares_of(instance)
        if shares is not None:
            row |= shares_object(shares, self._models.shares_since(instance))
        return row

    async def frontend_ready(self, _: HttpRequest, response: HttpResponse) -> None:
        """Answer 200 when this frontend takes requests, otherwise 503 with the reason."""
        reason = self._not_ready_reason()
        if reason:
            body = {"status": "not_ready", "reason": reason}
            response.send_json(503, body, retry_headers(503))
        else:
            response.send_json(200, {"status": "ready", "reason": ""})

    async def live(self, _: HttpRequest, response: HttpResponse) -> None:
        response.send_json(200, {"status": "live"})

    async def metrics(self, _: HttpRequest, response: HttpResponse) -> None:
        response.send(200, await self._metrics.render_all(), CONTENT_TYPE)


async def version(_: HttpRequest, response: HttpResponse) -> None:
    response.send_json(200, {"version": dynamo_trtllm.__version__})


def _instance_row(instance: Instance) -> dict[str, Any]:
    return {
        "component": instance.component,
        "endpoint": instance.endpoint,
        "namespace": instance.namespace,
        "instance_id": instance.id,  # a number, as in Dynamo's /health
        "id": f"{instance.id:x}",  # the form that logs, headers and `pairs` have
        "role": instance.role,
        "model": instance.card.name,
        "engine": instance.engine,
        "transport": {"nats_tcp": instance.subject},
    }
