"""Serve the endpoints that run no model: models, readiness, health, metrics and the API's description."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from dynamo_trtllm.api.common import error_body, model_list, model_object
from dynamo_trtllm.discovery.keys import endpoint_of
from dynamo_trtllm.errors import DynamoError, EngineNotReady, ModelNotFound
from dynamo_trtllm.frontend.base import ModelCatalog
from dynamo_trtllm.frontend.openapi import document
from dynamo_trtllm.http_server.errors import INVALID, retry_headers, to_response
from dynamo_trtllm.messages import Instance
from dynamo_trtllm.observability.metrics import CONTENT_TYPE, FrontendMetrics

PAGE_MAY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
NO_WORKER = "no worker has registered yet"


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status_code=status, headers=headers, media_type="application/json")


def error_response(status: int, message: str, *, code: str, headers: Mapping[str, str] | None = None) -> Response:
    return json_response(error_body(message, type=INVALID, code=code), status, headers)


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

    async def models(self, _: Request) -> Response:
        cards = [self._models.get(name).card for name in self._models.names()]
        return json_response(model_list([model_object(card, self._created) for card in cards]))

    async def model(self, request: Request) -> Response:
        """Answer with one model, or with all if the name is empty (`/v1/models/`)."""
        name = request.path_params["name"]
        if not name:
            return await self.models(request)
        try:
            served = self._models.get(name)
        except (ModelNotFound, EngineNotReady) as error:
            return _error_answer(error)
        return json_response(model_object(served.card, self._created))

    async def ready(self, request: Request) -> Response:
        """Answer 200 when the model can be served now, 503 with the reason when not, 404 for an unknown model."""
        name = request.path_params["name"]
        try:
            self._models.get(name)
            not_ready_reason = self._models.not_ready_reason(name)
        except ModelNotFound as error:
            return _error_answer(error)
        except EngineNotReady as error:
            return _not_ready(name, error.message)
        if not_ready_reason:
            return _not_ready(name, not_ready_reason)
        return json_response({"model": name, "status": "ready"})

    async def health(self, _: Request) -> Response:
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
        return json_response(body | {"message": "; ".join(not_ready_reason)} if not_ready_reason else body)

    async def frontend_ready(self, _: Request) -> Response:
        """Answer 200 when this frontend takes requests, otherwise 503 with the reason."""
        if not_ready_reason := self._not_ready_reason():
            return json_response({"status": "not_ready", "reason": not_ready_reason}, 503, retry_headers(503))
        return json_response({"status": "ready", "reason": ""})

    async def live(self, _: Request) -> Response:
        return json_response({"status": "live"})

    async def metrics(self, _: Request) -> Response:
        try:
            text = await self._metrics.render_all()
        except DynamoError as error:
            return _error_answer(error)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})


async def openapi(_: Request) -> Response:
    return Response(await asyncio.to_thread(_openapi), media_type="application/json")


@cache
def _openapi() -> bytes:
    return orjson.dumps(document())


async def docs(_: Request) -> Response:
    """Answer with a page that shows `/openapi.json`. It loads nothing from other servers."""
    page = files("dynamo_trtllm.frontend").joinpath("docs.html").read_bytes()
    return Response(page, media_type="text/html", headers={"Content-Security-Policy": PAGE_MAY})


def _not_ready(name: str, message: str) -> Response:
    return json_response({"model": name, "status": "not_ready", "message": message}, 503, retry_headers(503))


def _error_answer(error: DynamoError) -> Response:
    response = to_response(error)
    return json_response(response.body, response.status, response.headers)


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
