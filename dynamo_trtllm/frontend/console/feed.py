"""Send a snapshot of the deployment to all open consoles, once a second.

While a console is open at any frontend process of the namespace, all processes publish samples of
what they do. The processes at which a console is open merge the samples into one snapshot, which is
encoded once for all readers. Without a console, nothing is sampled, merged or sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.cluster.request_plane.subjects import load_subject
from dynamo_trtllm.frontend.console.merged_samples import MergedSamples
from dynamo_trtllm.frontend.console.reader import ConsoleReader
from dynamo_trtllm.frontend.console.sampler import ProcessSampler
from dynamo_trtllm.protocol.errors import BadFrame, Overloaded
from dynamo_trtllm.protocol.frontend_samples import FrontendSample, frontend_samples_subject
from dynamo_trtllm.protocol.messages import LoadReport, decode, encode

log = logging.getLogger(__name__)

SAMPLE_S: Final = 1.0  # the time between two samples
MAX_READERS: Final = 32  # the most readers of one process
# For how long this process sends samples after it got a sample of another process that has readers.
# This is longer than three samples, so that a lost sample does not matter.
_WANTED_S: Final = 3.5


@dataclass(eq=False)
class ConsoleFeed:
    """The consoles that are open at this process, and what they show.

    Args:
        sampler: samples this process.
        merged: merges the samples of all processes.
        plane: connects the frontends, and has the loads of workers.
        namespace: the namespace of the frontends.
        on_unreadable: called for each message that can't be read.
        sample_s: seconds between two samples.
    """

    _sampler: ProcessSampler
    _merged: MergedSamples
    _plane: RequestPlane
    _namespace: str
    _on_unreadable: Callable[[], None]
    _sample_s: float = SAMPLE_S
    _readers: set[ConsoleReader] = field(default_factory=set, init=False)
    # Until when other processes want the samples of this process.
    _wanted_until_s: float = field(default=0.0, init=False)
    # Set when a reader of this or another process begins to want samples.
    _wanted: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    @property
    def num_readers(self) -> int:
        """The number of consoles that are open at this process."""
        return len(self._readers)

    def join(self, reader: ConsoleReader) -> bytes:
        """Add a reader, and return its first event, which has the latest requests and snapshots.

        Raises:
            Overloaded: this process has too many readers.
        """
        if len(self._readers) >= MAX_READERS:
            raise Overloaded(
                f"{MAX_READERS} consoles are open at this frontend process, its limit; close one,"
                " or try again"
            )
        if not self._readers:
            self._merged.open_console()
        self._readers.add(reader)
        self._wanted.set()
        return self._merged.hello()

    def leave(self, reader: ConsoleReader) -> None:
        """Remove a reader. An unknown reader is ignored."""
        self._readers.discard(reader)

    async def run(self) -> None:
        """Sample and send while a console is open, until cancelled."""
        subject = frontend_samples_subject(self._namespace)
        unsubscribe = await self._plane.subscribe(subject, self._receive)
        try:
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                await self._run_while_wanted()
        finally:
            await unsubscribe()

    async def _run_while_wanted(self) -> None:
        self._sampler.begin()
        try:
            async with self._loads():
                sampled_s = time.monotonic()
                while self._is_wanted():
                    await asyncio.sleep(self._sample_s)
                    now_s = time.monotonic()
                    self._tick(now_s - sampled_s)
                    sampled_s = now_s
        finally:
            self._sampler.stop()

    def _is_wanted(self) -> bool:
        return bool(self._readers) or time.monotonic() < self._wanted_until_s

    @asynccontextmanager
    async def _loads(self) -> AsyncIterator[None]:
        """Receive the loads that workers report."""
        unsubscribe = await self._plane.subscribe(load_subject(self._namespace), self._receive_load)
        try:
            yield
        finally:
            await unsubscribe()

    def _tick(self, interval_s: float) -> None:
        """Publish a sample of this process, and send a snapshot to the readers."""
        sample = self._sampler.sample(interval_s, has_readers=bool(self._readers))
        self._plane.try_publish(frontend_samples_subject(self._namespace), encode(sample))
        if not self._readers:
            return
        self._merged.add(sample)
        events = self._merged.snapshot()
        for reader in list(self._readers):
            reader.push(events)

    def _receive(self, data: bytes, _: str) -> None:
        """Take the sample of another process."""
        try:
            sample = decode(data, FrontendSample)
        except BadFrame as exc:
            self._on_unreadable()
            log.debug("unreadable sample of a frontend: %s", exc.message)
            return
        if sample.process == self._sampler.process:
            return
        if sample.has_readers:
            self._wanted_until_s = time.monotonic() + _WANTED_S
            self._wanted.set()
        if self._readers:
            self._merged.add(sample)

    def _receive_load(self, data: bytes, _: str) -> None:
        try:
            report = decode(data, LoadReport)
        except BadFrame:  # the request plane counts these
            return
        self._merged.add_load(report)
