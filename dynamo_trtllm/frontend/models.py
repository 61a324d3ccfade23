"""The models a frontend serves: the cluster view kept by a watch, and per card a renderer made of fetched files.

The frontend has no model files of its own: what a card names is fetched from a worker, by content hash.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from contextlib import aclosing
from dataclasses import dataclass

from dynamo_trtllm import codec
from dynamo_trtllm.discovery.base import Discovery, Down, Synced, Up
from dynamo_trtllm.errors import BadFrame, DynamoError, ModelNotFound
from dynamo_trtllm.messages import FilePiece, FileRequest, Instance, ModelCard, Role
from dynamo_trtllm.plane.base import Plane
from dynamo_trtllm.render.base import Renderer
from dynamo_trtllm.render.select import renderer_for
from dynamo_trtllm.router.view import ClusterView

_log = logging.getLogger(__name__)

_RETRY_S = 1.0  # between attempts to fetch a card's files while no worker answers


@dataclass(frozen=True, slots=True)
class ServedModel:
    card: ModelCard
    renderer: Renderer


class Models:
    """`watch` is the one writer; everything else reads what it has put in place."""

    def __init__(self, view: ClusterView, discovery: Discovery, plane: Plane, namespace: str) -> None:
        self._view = view
        self._discovery = discovery
        self._plane = plane
        self._namespace = namespace
        self._served: dict[str, ServedModel] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        self.synced = asyncio.Event()  # discovery has told all that was there

    def get(self, name: str) -> ServedModel:
        """Raises ModelNotFound, naming what is served."""
        served = self._served.get(name)
        if served is None:
            known = ", ".join(self.names()) or "none yet"
            raise ModelNotFound(f"model {name!r} is not served here; served: {known}", field="model")
        return served

    def names(self) -> list[str]:
        return sorted(self._served)

    def instances(self) -> list[Instance]:
        return self._view.instances()

    def missing_roles(self, name: str) -> list[Role]:
        """Roles without which requests of this model are answered 503."""
        return self._view.model(name).missing_roles()

    async def watch(self) -> None:
        """Follows discovery until cancelled."""
        async with aclosing(self._discovery.watch(self._namespace)) as events:
            async for event in events:
                match event:
                    case Up(instance):
                        self._add(instance)
                    case Down(instance_id):
                        self._remove(instance_id)
                    case Synced():
                        self.synced.set()

    def _add(self, instance: Instance) -> None:
        name = instance.card.name
        _log.info("instance %x is up: %s of model %s", instance.id, instance.role, name)
        self._view.add(instance)
        served = self._served.get(name)
        if (served is None or served.card != self._view.models()[name]) and name not in self._loading:
            self._loading[name] = asyncio.create_task(self._load(name), name=f"load {name}")

    def _remove(self, instance_id: int) -> None:
        _log.info("instance %x is gone", instance_id)
        self._view.remove(instance_id)
        # A model stays known while its workers are away: its requests are answered 503, not 404.

    async def _load(self, name: str) -> None:
        """Puts the model's renderer in place, trying while the model has instances."""
        try:
            while (card := self._view.models().get(name)) is not None:
                try:
                    files = {file: await self._fetch(name, sha256) for file, sha256 in card.files.items()}
                    self._served[name] = ServedModel(card, await asyncio.to_thread(renderer_for, card, files))
                except DynamoError as exc:
                    _log.error("model %s can't be served yet (%s): %s", name, exc.code, exc.message)
                    await asyncio.sleep(_RETRY_S)
                    continue
                _log.info("model %s is served", name)
                return
        finally:
            del self._loading[name]

    async def _fetch(self, name: str, sha256: str) -> bytes:
        """A file of the card from any of the model's workers, in pieces. Raises BadFrame for another content."""
        holder = next(i for i in self._view.instances() if i.card.name == name and sha256 in i.card.files.values())
        data = bytearray()
        while True:
            reply = await self._plane.control(holder.subject, FileRequest(sha256, len(data)))
            piece = codec.decode(reply, FilePiece)
            data += piece.data
            if len(data) >= piece.total_bytes or not piece.data:
                break
        if hashlib.sha256(data).hexdigest() != sha256:
            raise BadFrame(f"instance {holder.id:x} sent another file than {sha256}; restart it")
        return bytes(data)

    async def aclose(self) -> None:
        loading = list(self._loading.values())
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
