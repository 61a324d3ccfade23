"""Serve the endpoints that run no model: models, readiness, health, metrics and the API's description."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

import orjson

from dynamo_trtllm.api.common import model_list, model_object
from dynamo_trtllm.discovery.keys import endpoint_of
from dynamo_trtllm.errors import EngineNotReady
from dynamo_trtllm.frontend.http.base import ModelCatalog
from dynamo_trtllm.frontend.http.openapi import document
from dynamo_trtllm.http_server.errors import retry_headers
from dynamo_trtllm.http_server.exchange import HttpRequest, HttpResponse
from dynamo_trtllm.messages import Instance
from dynamo_trtllm.observability.metrics import CONTENT_TYPE, FrontendMetrics

PAGE_MAY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
NO_WORKER = "no worker has registered yet"


class StatusRoutes:
    """The status endpoints, one method per path."""

    def __init__(
        self, models: ModelCatalog, metrics: FrontendMetrics, not_ready_reason: Callable[[], str | None]
    ) -> None:
        """`not_ready_reason` returns the reason for which `/ready` answers 503, or None."""
        self._models = models
        self._metrics = metrics
        self._not_ready_reason = not_ready_reason
        self._created = int(time.time())  # models have no creation time: the frontend's start is used

    async def models(self, request: HttpRequest, response: HttpResponse) -> None:
        cards = [self._models.get(name).card for name in self._models.names()]
        response.send_json(200, model_list([model_object(card, self._created) for card in cards]))

    async def model(self, request: HttpRequest, response: HttpResponse) -> None:
        """Answer with one model, or with all if the name is empty (`/v1/models/`)."""
        name = request.path_params["name"]
        if not name:
            await self.models(request, response)
        else:
            response.send_json(200, model_object(self._models.get(name).card, self._created))

    async def ready(self, request: HttpRequest, response: HttpResponse) -> None:
        """Answer 200 when the model can be served now, 503 with the reason when not, 404 for an unknown model."""
        name = request.path_params["name"]
        try:
            self._models.get(name)
            reason = self._models.not_ready_reason(name)
        except EngineNotReady as error:
            reason = error.message
        if reason:
            body = {"model": name, "status": "not_ready", "message": reason}
            response.send_json(503, body, retry_headers(503))
        else:
            response.send_json(200, {"model": name, "status": "ready"})

    async def health(self, _: HttpRequest, response: HttpResponse) -> None:
        """Answer 200 always, because this process responds. `status` is that of the deployment."""
        instances = sorted(self._models.instances(), key=lambda instance: (instance.component, instance.id))
        names = self._models.names()
        not_ready_reason = [reason for name in names if (reason := self._models.not_ready_reason(name))]
        if not names:
            not_ready_reason = [NO_WORKER]
        body: dict[str, Any] = {
            "status": "not_ready" if not_ready_reason else "healthy",
            "endpoints": sorted({str(endpoint_of(instance)) for instance in instances}),
            "instances": [_instance(instance) for instance in instances],
            **self._models.readiness(),
        }
        response.send_json(200, body | {"message": "; ".join(not_ready_reason)} if not_ready_reason else body)

    async def frontend_ready(self, _: HttpRequest, response: HttpResponse) -> None:
        """Answer 200 when this frontend takes requests, otherwise 503 with the reason."""
        if not_ready_reason := self._not_ready_reason():
            response.send_json(503, {"status": "not_ready", "reason": not_ready_reason}, retry_headers(503))
        else:
            response.send_json(200, {"status": "ready", "reason": ""})

    async def live(self, _: HttpRequest, response: HttpResponse) -> None:
        response.send_json(200, {"status": "live"})

    async def metrics(self, _: HttpRequest, response: HttpResponse) -> None:
        response.send(200, await self._metrics.render_all(), CONTENT_TYPE)


async def openapi(_: HttpRequest, response: HttpResponse) -> None:
    response.send(200, await asyncio.to_thread(_openapi))


@cache
def _openapi() -> bytes:
    return orjson.dumps(document())


async def docs(_: HttpRequest, response: HttpResponse) -> None:
    """Answer with a page that shows `/openapi.json`. It loads nothing from other servers."""
    page = files("dynamo_trtllm.frontend").joinpath("docs.html").read_bytes()
    response.send(200, page, "text/html; charset=utf-8", {"Content-Security-Policy": PAGE_MAY})


def _instance(instance: Instance) -> dict[str, Any]:
    return {
        "component": instance.component,
        "endpoint": instance.endpoint,
        "namespace": instance.namespace,
        "instance_id": instance.id,  # a number, as in Dynamo's /health
        "id": f"{instance.id:x}",  # as in logs, headers and `pairs`
        "role": instance.role,
        "model": instance.card.name,
        "engine": instance.engine,
        "transport": {"nats_tcp": instance.subject},
    }
