"""Hold the models that a frontend serves, updated from discovery, and report which are ready.

The frontend has no model files of its own. It fetches the files that a card names from a worker, by
their content hash.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

from dynamo_trtllm.access.access_control import Tenant
from dynamo_trtllm.cluster.discovery.discovery_interface import (
    Added,
    CardChosen,
    Discovery,
    RejectionChanged,
    Removed,
    SharesChanged,
    Synced,
)
from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.frontend.api.response_schemas import PairObject, ReadinessReport
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView, ModelView
from dynamo_trtllm.frontend.routing.pair_breakers import PairBreakers, PairState
from dynamo_trtllm.frontend.routing.pairs import Pair, differences, format_pair
from dynamo_trtllm.frontend.routing.probe_schedule import pairs_of
from dynamo_trtllm.frontend.tokenization.renderer import Renderer
from dynamo_trtllm.frontend.tokenization.renderer_registry import renderer_for
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent
from dynamo_trtllm.protocol.errors import (
    BadFrame,
    DynamoError,
    EngineNotReady,
    InternalError,
    ModelNotFound,
    NoInstances,
)
from dynamo_trtllm.protocol.messages import (
    FileChunk,
    GetFile,
    Instance,
    ModelDeploymentCard,
    Role,
    decode,
)
from dynamo_trtllm.protocol.shares import Shares, ShareTable
from dynamo_trtllm.support.background import cancel_all, in_thread

log = logging.getLogger(__name__)

# Limit of the total size of one card's files. The size that a worker sends is not trusted.
MAX_FILES_BYTES: Final = 256 << 20
_ERROR_CHARS: Final = 300  # longest quoted library error, in characters
NO_WORKER: Final = "no worker has registered yet"
MAX_WORKER_CHANGES: Final = 64  # how many of the latest changes are kept for the console


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryTiming:
    """Waits of a `ModelRegistry` in seconds. Users can't change them; tests do."""

    # The pause between attempts to fetch a card's files while no worker answers.
    retry_s: float = 1.0
    # From the load of a model until the rest of its renderer is loaded, if no long prompt needs the
    # rest sooner. Loading the rest takes 3 s of CPU time, and the first minute of a frontend is
    # busy.
    preload_after_s: float = 60.0


TIMING = RegistryTiming()


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """A worker that registered or left."""

    instance: Instance
    is_added: bool
    at: float  # seconds since the epoch


@dataclass(eq=False)
class ModelRegistry:
    """The models of the cluster. Only `watch` writes it."""

    _view: ClusterView
    _discovery: Discovery
    _plane: RequestPlane
    _namespace: str
    # With breakers, a model is ready only after one of its pairs has worked.
    _breakers: PairBreakers | None = None
    _timing: RegistryTiming = TIMING

    def __post_init__(self) -> None:
        self._cards: dict[str, ModelDeploymentCard] = {}  # the cards in use, by model
        self._served: dict[str, ServedModel] = {}
        self._announced: set[str] = set()  # models logged as ready
        self._loading: dict[str, asyncio.Task[None]] = {}
        # The timers of preloads, by model.
        self._preload_timers: dict[str, asyncio.TimerHandle] = {}
        self._rejected: dict[str, str] = {}  # why records are rejected, by etcd key
        self.share_table: ShareTable | None = None  # the last valid table
        self.synced = asyncio.Event()  # set once discovery has reported everything registered
        # The latest changes, the oldest first.
        self.worker_changes: deque[WorkerChange] = deque(maxlen=MAX_WORKER_CHANGES)

    def get(self, name: str, tenant: Tenant | None = None) -> ServedModel:
        """Return a model.

        Args:
            name: its name.
            tenant: the sender of the request; None: no API keys are needed.

        Raises:
            PermissionDenied: the sender may not use it.
            ModelNotFound: no worker serves it. The message lists the served models that the sender
                may use.
            EngineNotReady: this frontend is still loading its files.
        """
        if tenant is not None:
            tenant.check_model(name)
        served = self._served.get(name)
        if served is None and name in self._view.models():
            raise EngineNotReady(
                f"this frontend is still loading the files of model {name!r}; retry"
            )
        if served is None:
            known = ", ".join(self.names(tenant)) or "none yet"
            raise ModelNotFound(
                f"model {name!r} not found; available models: {known}", field="model"
            )
        return served

    def preload(self, name: str) -> None:
        """Begin to load what a model's renderer has not loaded yet. Idempotent.

        The timer of the model calls this, or the first long prompt, which needs it sooner.
        """

        def preloaded(future: asyncio.Future[None]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            if error is not None:
                text = "the tokenizer of model %s cannot be preloaded: %s"
                log.error(text, name, error, exc_info=error)

        timer = self._preload_timers.pop(name, None)
        if timer is not None:
            timer.cancel()
            # The preload runs in asyncio's threads, and takes none of the few threads for requests.
            preload = self._served[name].renderer.preload
            loading = asyncio.get_running_loop().run_in_executor(None, preload)
            loading.add_done_callback(preloaded)

    def names(self, tenant: Tenant | None = None) -> list[str]:
        """Return the served models that a sender may use; None: no API keys are needed."""
        names = sorted(self._served)
        if tenant is None:
            return names
        return [name for name in names if tenant.may_use(name)]

    def instances(self) -> list[Instance]:
        return self._view.instances()

    def shares_of(self, instance: Instance) -> Shares | None:
        """Return the shares of an elastic worker as they are now; None: it has a fixed role."""
        return self._view.model(instance.card.name).shares.get(instance.id)

    def shares_since(self, instance: Instance) -> float | None:
        """Return when the shares of an elastic worker changed last, in seconds since the epoch.

        None: it has the shares with which it registered.
        """
        return None if self.share_table is None else self.share_table.since.get(instance.id)

    def shares(self) -> dict[int, Shares]:
        """Return the shares of all elastic workers as they are now, by instance id."""
        shares: dict[int, Shares] = {}
        for name in self._view.models():
            shares.update(self._view.model(name).shares)
        return shares

    def num_rejected(self) -> int:
        """Return the number of etcd records that are rejected now."""
        return len(self._rejected)

    def not_ready_reason(self, name: str) -> str | None:
        """Return why the model cannot be served now, as text for people; None if it can."""
        return self._plane.unavailable_reason() or not_ready_reason(
            self._view.model(name), name, self._breakers
        )

    def not_ready_reasons(self) -> list[str]:
        """Return why models cannot be served now, as text for people; [] if all can."""
        names = self.names()
        if not names:
            return [NO_WORKER]
        reasons = [self.not_ready_reason(name) for name in names]
        return [reason for reason in reasons if reason]

    def readiness(self, limit: int) -> ReadinessReport:
        """Return all pairs, the instances that match no other, and the rejected etcd records.

        Each list has at most `limit` entries, because thousands of workers have thousands of pairs.
        """
        views = {name: self._view.model(name) for name in sorted(self._view.models())}
        breakers = self._breakers or PairBreakers()
        now = time.monotonic()
        quarantined = breakers.quarantined
        pairs = {name: pairs_of(view, quarantined) for name, view in views.items()}
        quarantined_pairs = []
        if quarantined:
            quarantined_pairs = [
                (name, pair) for name, pair in _with_models(pairs) if pair in quarantined
            ]
        # Quarantined pairs come first, and all pairs follow. Each quarantined pair may thus come
        # twice, so that many pairs more are taken before `dict.fromkeys` removes duplicates.
        first_pairs = islice(
            chain(quarantined_pairs, _with_models(pairs)), limit + len(quarantined_pairs)
        )
        shown = dict.fromkeys(first_pairs)
        mismatched = chain.from_iterable(map(mismatches, views.values()))
        return ReadinessReport(
            num_pairs=sum(map(len, pairs.values())),
            num_quarantined=len(quarantined_pairs),
            pairs=[pair_row(name, pair, breakers, now) for name, pair in islice(shown, limit)],
            mismatched=list(islice(mismatched, limit)),
            rejected_records=[
                {"key": key, "reason": self._rejected[key]}
                for key in sorted(self._rejected)[:limit]
            ],
            discovery_problem=self._discovery.problem,
        )

    async def watch(self) -> None:
        """Follow discovery until cancelled."""
        async with aclosing(self._discovery.watch(self._namespace)) as events:
            async for event in events:
                match event:
                    case Added(instance):
                        self._add(instance)
                    case Removed(instance_id):
                        self._remove(instance_id)
                    case CardChosen(card):
                        self._cards[card.name] = card
                        self._load_changed()
                    case RejectionChanged(key, None):
                        self._rejected.pop(key, None)
                    case RejectionChanged(key, str(reason)):
                        self._rejected[key] = reason
                    case SharesChanged(table):
                        self._set_shares(table)
                    case Synced():
                        self.synced.set()

    def _set_shares(self, table: ShareTable | None) -> None:
        self.share_table = table
        if table is None:
            log.info("the share table is gone: workers have the shares they registered")
            RECORDER.record_process(RecordedEvent.SHARES_CHANGED)
            self._view.set_shares({})
            return
        log.info(
            "shares changed: revision %d of epoch %d%s",
            table.revision,
            table.epoch,
            f": {table.reason}" if table.reason else "",
        )
        RECORDER.record_process(RecordedEvent.SHARES_CHANGED, a=table.epoch, b=table.revision)
        self._view.set_shares(table.workers)

    async def wait_until_loaded(self) -> None:
        """Return when the models of all workers that were registered at the start are loaded."""
        await self.synced.wait()
        if self._loading:
            await asyncio.wait(list(self._loading.values()))

    def _add(self, instance: Instance) -> None:
        name = instance.card.name
        log.info("%s worker %x registered: model %s", instance.role, instance.id, name)
        is_new = self._view.instance(instance.id) is None  # otherwise, its record has changed
        if is_new:
            self.worker_changes.append(WorkerChange(instance, is_added=True, at=time.time()))
        self._view.add(instance)
        self._warn_of_another_card(instance)
        self._load_changed()
        self._announce(name)

    def _remove(self, instance_id: int) -> None:
        log.info("worker %x left", instance_id)
        instance = self._view.instance(instance_id)
        if instance is not None:
            self.worker_changes.append(WorkerChange(instance, is_added=False, at=time.time()))
        self._view.remove(instance_id)
        for name in list(self._announced):
            if self._view.model(name).is_complete:
                continue
            self._announced.discard(name)
            reason = not_ready_reason(self._view.model(name), name, None)
            log.info("model %s is not available any more: %s", name, reason)
        # A model without workers stays known, so that its requests get 503 and not 404.

    def _announce(self, name: str) -> None:
        """Log that the model is ready, once its files are loaded and each role has a worker."""
        if (
            name in self._served
            and name not in self._announced
            and self._view.model(name).is_complete
        ):
            self._announced.add(name)
            log.info("model %s is ready", name)

    def _warn_of_another_card(self, instance: Instance) -> None:
        """Warn if the instance's card differs from the card in use.

        The card in use changes as workers come and go. The context length of prefill workers may
        differ: they reject prompts that are too long for them.
        """
        card = self._cards[instance.card.name]
        may_differ = {"context_length"} if instance.role is Role.PREFILL else set()
        names = [name for name in card.__struct_fields__ if name not in may_differ]
        differ = [name for name in names if getattr(card, name) != getattr(instance.card, name)]
        if differ:
            log.warning(
                "worker %x of model %s differs from the card in use in %s; start all its workers"
                " with the same flags",
                instance.id,
                card.name,
                ", ".join(differ),
            )

    def _load_changed(self) -> None:
        """Begin to load each model whose card in use is not loaded."""
        for name in self._view.models():
            if name not in self._loading and self._card_to_load(name) is not None:
                self._loading[name] = asyncio.create_task(self._load(name), name=f"load {name}")

    def _card_to_load(self, name: str) -> ModelDeploymentCard | None:
        """Return the card in use of a model.

        Return None if it is loaded or the model has no instances.
        """
        if name not in self._view.models():
            return None
        card = self._cards[name]
        served = self._served.get(name)
        is_loaded = served is not None and served.card == card
        return None if is_loaded else card

    async def _load(self, name: str) -> None:
        """Load the renderer of the model's current card, retrying while the model has instances."""
        logged_error = ""
        try:
            while (card := self._card_to_load(name)) is not None:
                try:
                    files = await self._fetch_all(card)
                    renderer = await in_thread(_renderer, card, files)
                    self._served[name] = ServedModel(card, renderer)
                    self._preload_timers[name] = asyncio.get_running_loop().call_later(
                        self._timing.preload_after_s, self.preload, name
                    )
                    self._announce(name)
                    if name not in self._announced:
                        reason = not_ready_reason(self._view.model(name), name, None)
                        log.info("model %s is loaded, but not available yet: %s", name, reason)
                except DynamoError as exc:
                    # The same error is logged once, and not for each attempt.
                    is_new = exc.message != logged_error
                    if is_new:
                        logged_error = exc.message
                        # Only an unexpected error is logged with its traceback.
                        unexpected = exc if isinstance(exc, InternalError) else None
                        log.error(
                            "model %s cannot be loaded yet (%s): %s",
                            name,
                            exc.code,
                            exc.message,
                            exc_info=unexpected,
                        )
                    await asyncio.sleep(self._timing.retry_s)
        finally:
            del self._loading[name]

    async def _fetch_all(self, card: ModelDeploymentCard) -> dict[str, bytes]:
        """Fetch the card's files and return them by name. Raises the errors of `_fetch`."""
        files: dict[str, bytes] = {}
        bytes_left = MAX_FILES_BYTES
        for file, sha256 in card.files.items():
            files[file] = await self._fetch(card.name, sha256, bytes_left)
            bytes_left -= len(files[file])
        return files

    async def _fetch(self, name: str, sha256: str, max_bytes: int) -> bytes:
        """Fetch a file from the first of the model's workers that sends it.

        Raises the last worker's error.
        """
        error: DynamoError = NoInstances(f"no worker of model {name!r} has file {sha256} now")
        for worker in self._view.instances():
            if worker.card.name == name and sha256 in worker.card.files.values():
                try:
                    return await self._fetch_from(worker, sha256, max_bytes)
                except DynamoError as exc:
                    error = exc
        raise error

    async def _fetch_from(self, worker: Instance, sha256: str, max_bytes: int) -> bytes:
        """Fetch the file in chunks.

        Raises BadFrame if the content or a size is wrong, and the errors of `PlaneClient.control`.
        """
        data = bytearray()
        total_bytes: int | None = None
        while total_bytes is None or len(data) < total_bytes:
            reply = await self._plane.client.control(worker.subject, GetFile(sha256, len(data)))
            chunk = decode(reply, FileChunk)
            if total_bytes is None:
                total_bytes = chunk.total_bytes
            wrong = _wrong_size(chunk, len(data), total_bytes, max_bytes)
            if wrong:
                raise BadFrame(f"instance {worker.id:x} sent file {sha256} {wrong}")
            data += chunk.data
        if hashlib.sha256(data).hexdigest() != sha256:
            raise BadFrame(
                f"instance {worker.id:x} sent a file whose hash is not {sha256}; restart it"
            )
        return bytes(data)

    async def aclose(self) -> None:
        await cancel_all(self._loading.values())
        for timer in self._preload_timers.values():
            timer.cancel()
        self._preload_timers.clear()


def _renderer(card: ModelDeploymentCard, files: Mapping[str, bytes]) -> Renderer:
    """Create the renderer, in a thread.

    Any exception that is not a DynamoError becomes an InternalError.
    """
    try:
        return renderer_for(card, files)
    except DynamoError:
        raise
    # The tokenizer library panics on some broken files, and a panic is a BaseException. It must not
    # end the loading task. A cancellation is never raised in a thread.
    except BaseException as exc:
        raise InternalError(
            f"cannot load the tokenizer files of model {card.name!r}: {type(exc).__name__}:"
            f" {str(exc)[:_ERROR_CHARS]}; replace them on the workers"
        ) from exc


def _wrong_size(chunk: FileChunk, offset: int, total_bytes: int, max_bytes: int) -> str:
    """Return what is wrong with the sizes in a chunk; "" if they are correct."""
    if chunk.total_bytes != total_bytes:
        return f"with total size {total_bytes}, then {chunk.total_bytes}; restart it"
    if total_bytes > max_bytes:
        return (
            f"with size {total_bytes}; allowed are at most {max_bytes} bytes, and"
            f" {MAX_FILES_BYTES >> 20} MiB for all files of a model"
        )
    if offset + len(chunk.data) > total_bytes:
        return (
            f"with {offset + len(chunk.data)} bytes where {total_bytes} were announced; restart it"
        )
    if not chunk.data and offset < total_bytes:
        return f"with only {offset} of {total_bytes} bytes; restart it"
    return ""


def _with_models(pairs: Mapping[str, Iterable[Pair]]) -> Iterator[tuple[str, Pair]]:
    """Yield all pairs, each with the name of its model."""
    for name, pairs_of_model in pairs.items():
        for pair in pairs_of_model:
            yield name, pair


_MAX_NAMED = 20  # limit of the pairs or instances that a message names


def not_ready_reason(view: ModelView, name: str, breakers: PairBreakers | None) -> str | None:
    """Return why the model cannot be served now; None if it can.

    With `breakers`, one pair must have worked.
    """
    missing = view.missing_roles()
    if missing:
        workers = " and no ".join(f"{role} worker" for role in missing)
        return f"model {name} has no {workers}"
    pairs = pairs_of(view)
    if not pairs:
        differing = "; ".join(islice(mismatches(view), _MAX_NAMED))
        return f"no prefill worker of model {name} matches a decode worker: {differing}"
    if breakers is None or any(breakers.status(pair).state is PairState.WORKING for pair in pairs):
        return None
    states = []
    for pair in pairs[:_MAX_NAMED]:
        status = breakers.status(pair)
        reason = f" ({status.reason})" if status.reason else ""
        states.append(f"{format_pair(pair)} is {status.state}{reason}")
    return f"model {name}: KV transfer works for no pair now: {'; '.join(states)}"


def mismatches(view: ModelView) -> Iterator[str]:
    """Yield a line for each instance that matches no instance of the other role.

    The line has the fields that differ.
    """
    for instances, others in ((view.prefill, view.decode), (view.decode, view.prefill)):
        other_keys = {view.keys[other.id] for other in others}
        for instance in instances:
            if other_keys and view.keys[instance.id] not in other_keys:
                differing = differences(instance, others[0])
                yield f"instance {instance.id:x} ({instance.role}): {differing}"


def pair_row(name: str, pair: Pair, breakers: PairBreakers, now: float) -> PairObject:
    """Return the state of a pair of this model. `now` is a time of the breakers' clock."""
    status = breakers.status(pair)
    prefill, decode = pair
    age_s = None
    if status.state is not PairState.UNTRIED:
        age_s = round(now - status.seen_at, 3)
    return {
        "model": name,
        "prefill": None if prefill is None else f"{prefill:x}",
        "decode": f"{decode:x}",
        "state": status.state,
        "reason": status.reason,
        "age_s": age_s,
    }
