"""Extend vLLM's NixlConnector and its scheduler: end requests whose KV was not read in time, and
note the times of reads.

vLLM loads this module by name in the processes of prefill and decode engines.

The modules of the package `patches` mend faults of vLLM, and name the releases that have them. This
module has the hooks that the patches use.

Late reads: a read that ends after the KV transfer has expired counts as failed, because the blocks
may hold another request's KV. The worker half reports failed reads with each step, and the
scheduler ends their requests before anything is computed or cached from their blocks.

Times: a read waits for several steps of the engine. Both halves note when its parts begin and end,
on the host's monotonic clock, and the last output of the request has these times.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dynamo_trtllm.engines.vllm import early_notice
from dynamo_trtllm.engines.vllm.chunk_threshold import follow_streams
from dynamo_trtllm.engines.vllm.patches import failed_reads, late_reads, retained_windows
from dynamo_trtllm.engines.vllm.patches.last_token import num_remote_tokens
from dynamo_trtllm.engines.vllm.patches.late_reads import EndedReads
from dynamo_trtllm.engines.vllm.releases import PACKAGE
from dynamo_trtllm.engines.vllm.requests import READ_TIMES
from dynamo_trtllm.engines.vllm.steps import measure_steps
from dynamo_trtllm.engines.vllm.transfer_params import set_listen_address

log = logging.getLogger(__name__)
_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
# The connector with which an engine reads KV.
_Base: Any = PACKAGE.find("NixlPullConnector", f"{_V1}.nixl.connector")


@dataclass
class EndedTransfers:
    """Requests whose transfers have ended."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    # Requests whose reads failed. They are in `received`, too. vLLM reports them from 0.30 on.
    failed: set[str] = field(default_factory=set)

    def add(self, sent: Iterable[str], received: Iterable[str], failed: Iterable[str]) -> None:
        """Add the transfers of one report."""
        self.sent.update(sent)
        self.received.update(received)
        self.failed.update(failed)


class NixlConnector(_Base):  # type: ignore[misc]  # vLLM is not typed here
    """vLLM's connector with the hooks of this module.

    The class has the name of vLLM's class, so that vLLM's checks and logs of the connector's name
    stay correct.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_scheduler is not None:
            set_listen_address(self.connector_scheduler, vllm_config)
        # Failed reads, until a step has reported their end. A failed read is reported twice: its
        # failure as soon as it is known, and its end once vLLM reports the end. Handshakes add to
        # the set on another thread.
        self._failed: set[str] = set()
        # Reads in `_failed` whose failure a step has reported.
        self._reported_failures: set[str] = set()
        # True for releases without the patch for failed reads: vLLM itself reports failed reads
        # there, in `get_transfer_results`.
        self._asks_for_results = not failed_reads.is_needed()
        self._posted: dict[str, float] = {}  # when the read of each request was posted
        # For each ended read that is not reported yet: when it was posted, and when its end was
        # noticed.
        self._times: dict[str, tuple[float, float]] = {}
        self._ended = EndedTransfers()  # transfers that no step has reported yet
        self._is_asked = False  # True once this process's scheduler has asked for ended reads
        # Ended reads that the scheduler has put back, because a step has to report them.
        self._left_to_steps: set[str] = set()
        # Reads whose end the last step has reported.
        self._reported_ends: frozenset[str] = frozenset()
        if self.connector_worker is not None:
            failed_reads.watch(self.connector_worker, self._failed.add)
            self._note_posts(self.connector_worker)
            early_notice.note_worker_half(self, vllm_config)

    def _note_posts(self, worker: Any) -> None:
        """Note when each read was posted, in vLLM's method `_read_blocks_for_req`.

        If a release lacks this method, `kv_transfer.read` is 0, and ended reads are noticed a step
        later.
        """
        read = getattr(worker, "_read_blocks_for_req", None)
        if read is None:
            log.warning(
                "this vLLM has no _read_blocks_for_req: reads are noticed later, and their times"
                " not known"
            )
            return

        @functools.wraps(read)
        def posting(req_id: str, meta: Any, *args: Any, **keywords: Any) -> Any:
            result = read(req_id, meta, *args, **keywords)
            # A call without blocks is for an aborted request: it reads nothing, and only makes the
            # prefill engine free the KV.
            if any(meta.local_block_ids):
                self._posted[req_id] = time.monotonic()
            return result

        worker._read_blocks_for_req = posting

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return the requests whose KV was sent, and the requests whose read has ended.

        vLLM calls this method in each step.
        """
        base: Any = super()
        self._look(partial(base.get_finished, finished_req_ids))
        ended = self._take_ended()
        return ended.sent, ended.received

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the same as `get_finished`, and the failed reads.

        From 0.30 on vLLM calls this method in place of `get_finished`.
        """
        base: Any = super()
        results = self._look(partial(base.get_transfer_results, finished_req_ids))
        ended = self._take_ended()
        return dataclasses.replace(
            results,
            finished_sending=ended.sent,
            finished_recving=ended.received,
            failed_recving=ended.failed,
        )

    def _take_ended(self) -> EndedTransfers:
        """Return the transfers that this step reports."""
        ended = self._ended
        # If the scheduler of this process asks for ended reads before its next step, keep the reads
        # that have ended well for it. It learns the results of this step only one or two steps
        # later, and the reads of short prompts have often ended by now.
        kept = self._well_received() if self._is_asked else set()
        ended.received -= kept
        self._ended = EndedTransfers(received=kept)
        self._left_to_steps -= ended.received
        self._reported_ends = frozenset(ended.received)
        return ended

    def _well_received(self) -> set[str]:
        """Return the reads that have ended well and that the scheduler may take."""
        return self._ended.received - self._ended.failed - self._failed - self._left_to_steps

    def _look(self, ask: Callable[[], Any]) -> Any:
        """Ask vLLM's connector which transfers have ended.

        The ended transfers are added to `_ended`, the transfers that no step has reported yet.
        """
        results = ask()
        now = time.monotonic()
        if isinstance(results, tuple):
            sent, received = results
            failed: set[str] = set()
        else:
            sent = results.finished_sending
            received = results.finished_recving
            failed = results.failed_recving
        self._ended.add(sent, received, failed)
        for request_id in received:
            posted_at = self._posted.pop(request_id, now)
            self._times[request_id] = (posted_at, now)
        return results

    def take_well_received(self) -> dict[str, tuple[float, float]]:
        """Return the reads that have ended well, with their times. No step will report them.

        vLLM's connector is asked for ended reads only while a read is under way.
        """
        self._is_asked = True
        if self._posted:
            base: Any = super()
            ask = base.get_transfer_results if self._asks_for_results else base.get_finished
            self._look(partial(ask, set()))
        well_received = self._well_received()
        self._ended.received -= well_received
        return {request_id: self._times.pop(request_id) for request_id in well_received}

    def put_back(self, request_id: str, times: tuple[float, float]) -> None:
        """Let the next step report a read that was taken."""
        self._ended.received.add(request_id)
        self._left_to_steps.add(request_id)
        self._times[request_id] = times

    def build_connector_worker_meta(self) -> EndedReads | None:
        """Return the reads that have failed, and the times of the reads whose end this step
        reports.

        vLLM calls this method after each step, in each rank.
        """
        failed = set(self._failed) - self._reported_failures
        self._reported_failures |= failed
        # Forget the failed reads of which both the failure and the end were reported.
        ended = self._reported_failures & self._reported_ends
        self._failed -= ended
        self._reported_failures -= ended
        times = {
            request_id: self._times.pop(request_id)
            for request_id in self._reported_ends
            if request_id in self._times
        }
        if not failed and not times:
            return None
        return EndedReads(frozenset(failed), times)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note when the blocks for a read of KV were allocated.

        The read begins with the next step.
        """
        params = request.kv_transfer_params or {}
        if num_external_tokens and params.get("do_remote_prefill"):
            params[READ_TIMES] = [time.monotonic()]
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the request's blocks are held for another engine, and the
        `kv_transfer_params` of the request's last output.
        """
        stays, params = super().request_finished_all_groups(request, block_ids)
        given = request.kv_transfer_params or {}
        read_times = given.get(READ_TIMES)
        if params is None and read_times:
            params = {READ_TIMES: read_times}
        return stays, params

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many more tokens are read, and whether they are read between steps."""
        count, between_steps = super().get_num_new_matched_tokens(request, num_computed_tokens)
        params = request.kv_transfer_params or {}
        if not (between_steps and params.get("do_remote_prefill")):
            return count, between_steps
        wanted = num_remote_tokens(
            num_computed_tokens + count,
            params.get("remote_num_tokens") or 0,
            self.connector_scheduler.block_size,
        )
        # If only the last token is left, keep vLLM's count, because vLLM handles a count of 0 in
        # another way. The KV of this token is then read, too, and overwritten when the engine
        # computes the token.
        if wanted > num_computed_tokens:
            count = wanted - num_computed_tokens
        return count, between_steps


retained_windows.install()
late_reads.install()
_Scheduler: Any = PACKAGE.find("Scheduler", "vllm.v1.core.sched.scheduler")
measure_steps(_Scheduler)
follow_streams(_Scheduler)
# These three functions wrap `schedule`, and the wrapper that is installed last runs first. So the
# scheduler knows which reads have ended when the other wrappers plan a step.
early_notice.install()
