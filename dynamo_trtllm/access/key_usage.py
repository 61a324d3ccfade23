"""Count the usage of each API key over all processes of a frontend, and enforce its limits.

The processes share memory. Each process writes only its own part of the memory and reads the parts
of all. So no locks are needed, and a process that stops or dies does not delay the others. A
process first counts a request, and then checks the sum of all parts. So if requests arrive at
several processes at the same moment, they never exceed a limit together, but all of them may be
rejected.

The usage of keys at other frontends counts, too. It is in `OtherFrontends`.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import sys
import time
from collections.abc import Callable
from itertools import islice
from typing import Final

from dynamo_trtllm.access.api_keys import ApiKey
from dynamo_trtllm.access.other_frontends import OtherFrontends
from dynamo_trtllm.protocol.errors import ConfigError, ExceedsKeyLimit, RateLimitExceeded
from dynamo_trtllm.protocol.frontend_usage import KeyTotals

# Usage per minute is counted in slots of 4 s. The newest 16 of them cover any 60 s.
SLOT_S: Final = 4.0
_NUM_SLOTS = 16
_WINDOW_S: Final = SLOT_S * _NUM_SLOTS
# A row counts the usage of one key in one process. Its numbers, by their offset:
#   0               id of the key
#   _RUNNING        number of generations that run or wait
#   _NEWEST         newest slot that was counted
#   _REQUESTS       requests in the 16 slots up to the newest slot; the number of each slot follows
#   _TOKENS         tokens in the 16 slots up to the newest slot; the number of each slot follows
_RUNNING = 1
_NEWEST = 2
_REQUESTS = 3
_TOKENS = _REQUESTS + 1 + _NUM_SLOTS
_ROW_SIZE = _TOKENS + 1 + _NUM_SLOTS
# Most keys with limits that a process can count since its start. Removed keys count, too.
_MAX_ROWS = 32_768
# Two numbers stand before the rows of a process: how many rows it has, and its id.
_PART_HEAD_SIZE = 2
_PART_SIZE = _PART_HEAD_SIZE + _MAX_ROWS * _ROW_SIZE
_NUMBER_BYTES = 8
_HEAD_SIZE = 1  # one number stands before the parts: the id of the frontend
_MAX_REPORTED = 4096  # most keys in one report
_RETRY_S = 1  # a client should retry after this time if it is not known when the limit ends
_ABOUT: Final = ("limit", "remaining", "reset")  # a limit has a header for each of these


def shared_memory(num_processes: int) -> int:
    """Return a file in memory for the parts of all processes of a frontend. The caller closes it.

    The file takes space only for the pages that were written.
    """
    file = os.memfd_create("api-key-usage")
    os.ftruncate(file, (_HEAD_SIZE + num_processes * _PART_SIZE) * _NUMBER_BYTES)
    os.pwrite(file, _new_id().to_bytes(_NUMBER_BYTES, sys.byteorder), 0)
    return file


def _new_id() -> int:
    """Return a random positive id for a frontend or a process."""
    return secrets.randbits(62) + 1


class UsageTable:
    """The memory that the processes of a frontend share.

    Args:
        file: the file of `shared_memory`, which may be closed afterwards. None: the frontend has
            only this process.
        number: number of this process, counted from 1.
        num_processes: number of processes of the frontend.
        clock: returns seconds of a monotonic clock that all processes share.
    """

    def __init__(
        self,
        file: int | None = None,
        number: int = 1,
        num_processes: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        size = (_HEAD_SIZE + num_processes * _PART_SIZE) * _NUMBER_BYTES
        memory = mmap.mmap(-1 if file is None else file, size)
        self.numbers = memoryview(memory).cast("q")
        # 0: there is no file, so the memory is new.
        shared_id = self.numbers[0]
        self.frontend_id = shared_id or _new_id()
        self.clock = clock
        self.others = OtherFrontends(clock)
        # The ids of keys whose usage may have changed since the last report, the oldest change
        # first.
        self._changed: dict[int, None] = {}
        self._own = _ProcessPart(self.numbers, number - 1)
        self._other_parts = [
            _ProcessPart(self.numbers, index)
            for index in range(num_processes)
            if index != number - 1
        ]
        # After a crash, this process takes over the part and the id of the crashed process. So the
        # reports of this process replace those of the crashed process, which count generations that
        # have ended.
        self.process_id = self._own.process_id()
        for key_id in self._own.end_generations():
            self.changed(key_id)

    def usage(self, key: ApiKey) -> KeyUsage | None:
        """Return the object that counts the usage of a key. None: the key has no limits.

        Raises:
            ConfigError: there were too many keys since the start.
        """
        return KeyUsage(key, self) if key.has_limits else None

    def own_row(self, key_id: int) -> int:
        """Return the place of a key's row in the part of this process. Add a row if necessary."""
        row = self._own.find(key_id)
        return self._own.add(key_id) if row is None else row

    def other_rows(self, key_id: int) -> list[int]:
        """Return the places of a key's rows in the parts of the processes that know the key."""
        found = [part.find(key_id) for part in self._other_parts]
        return [row for row in found if row is not None]

    def changed(self, key_id: int) -> None:
        """Note that the usage of a key may have changed. Reports have the key until it uses 0."""
        self._changed[key_id] = None

    def totals(self) -> dict[int, KeyTotals]:
        """Return what keys use in this process, by id of the key, for a report.

        The result has only keys whose usage may have changed, and at most _MAX_REPORTED keys.
        """
        slot = int(self.clock() / SLOT_S)
        totals: dict[int, KeyTotals] = {}
        for key_id in list(islice(self._changed, _MAX_REPORTED)):
            row = self.own_row(key_id)
            totals[key_id] = KeyTotals(
                self.numbers[row + _RUNNING],
                self.minute(row, _REQUESTS, slot),
                self.minute(row, _TOKENS, slot),
            )
            del self._changed[key_id]
            if totals[key_id] != KeyTotals():
                # Even without further requests, the usage changes: it falls as time passes. So
                # later reports have this key, too, until its usage is 0. The key goes to the end,
                # so that each report leaves out other keys if there are too many.
                self._changed[key_id] = None
        return totals

    def minute(self, row: int, sum_offset: int, slot: int) -> int:
        """Return the sum over the minute that ends with a slot.

        Args:
            row: place of the row of a key.
            sum_offset: offset of the sum of requests or of tokens in a row.
            slot: the current slot, or a later slot.
        """
        numbers = self.numbers
        newest = numbers[row + _NEWEST]
        if newest <= slot - _NUM_SLOTS:
            return 0
        total = numbers[row + sum_offset]
        # A process updates the sum only when it counts something. So the stored sum is that of the
        # minute that ends with `newest`. Subtract the slots that have left the minute since then.
        first_in_sum = newest - _NUM_SLOTS + 1
        first_wanted = slot - _NUM_SLOTS + 1
        for passed in range(first_in_sum, first_wanted):
            total -= numbers[row + sum_offset + 1 + passed % _NUM_SLOTS]
        return total

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return 1 + len(self._other_parts)


class _ProcessPart:
    """The part of one process. Only this process adds rows, and rows never move."""

    def __init__(self, numbers: memoryview, index: int) -> None:
        self._numbers = numbers
        self._begin = _HEAD_SIZE + index * _PART_SIZE
        # The places of the rows that were read or added, by id of the key.
        self._rows: dict[int, int] = {}
        self._num_read = 0  # number of rows that were read

    def find(self, key_id: int) -> int | None:
        """Return the place of a key's row, or None if the key has no row."""
        num_rows = self._numbers[self._begin]
        for index in range(self._num_read, num_rows):
            row = self._row(index)
            self._rows[self._numbers[row]] = row
        self._num_read = num_rows
        return self._rows.get(key_id)

    def add(self, key_id: int) -> int:
        """Add a row for a key, and return its place."""
        num_rows = self._numbers[self._begin]
        if num_rows == _MAX_ROWS:
            raise ConfigError(
                f"this process has seen {_MAX_ROWS} API keys with limits since its start, which is"
                " the most that it can count; restart the frontend",
                field="api_keys_file",
            )
        row = self._row(num_rows)
        self._numbers[row] = key_id
        # Other processes read the row from now on.
        self._numbers[self._begin] = num_rows + 1
        self._rows[key_id] = row
        return row

    def process_id(self) -> int:
        """Return the id of the process for its reports. After a crash, the id is the same."""
        place = self._begin + 1
        self._numbers[place] = self._numbers[place] or _new_id()
        return self._numbers[place]

    def end_generations(self) -> list[int]:
        """Count no generations as running. Return the ids of all keys."""
        rows = [self._row(index) for index in range(self._numbers[self._begin])]
        for row in rows:
            self._numbers[row + _RUNNING] = 0
        return [self._numbers[row] for row in rows]

    def _row(self, index: int) -> int:
        """Return the place of a row."""
        return self._begin + _PART_HEAD_SIZE + index * _ROW_SIZE


class KeyUsage:
    """The usage of one key. Its limits hold for all processes."""

    def __init__(self, key: ApiKey, table: UsageTable) -> None:
        self._key = key
        self._table = table
        self._numbers = table.numbers
        self._num_processes = table.num_processes
        # For each limit per minute: the offset of its sum in a row, the limit, the limit as text,
        # and the names of its headers.
        self._limits = [
            (sum_offset, limit, str(limit), [f"x-ratelimit-{about}-{name}" for about in _ABOUT])
            for name, sum_offset, limit in (
                ("requests", _REQUESTS, key.requests_per_minute),
                ("tokens", _TOKENS, key.tokens_per_minute),
            )
            if limit is not None
        ]
        # These are 64 bits of the hash of the key. The chance that any two of 32,768 keys have the
        # same bits is 1 to 30 billion.
        self._id = int.from_bytes(bytes.fromhex(key.sha256)[:8], "big", signed=True)
        self._own = table.own_row(self._id)
        self._all_rows = [self._own]

    def count_request(self) -> None:
        """Count a request.

        Raises:
            RateLimitExceeded: there were too many in the last minute. This request is not counted.
        """
        self._add("requests", _REQUESTS, 1, self._key.requests_per_minute)

    def check(self) -> None:
        """Check that the key has tokens and generations left, before a request takes any work.

        Raises:
            RateLimitExceeded: one of these limits is reached.
        """
        key = self._key
        if key.tokens_per_minute is not None:
            if self._sum(_TOKENS, self._slot()) >= key.tokens_per_minute:
                raise self._exceeded("tokens", _TOKENS, 1, key.tokens_per_minute)
        if key.concurrent_generations is not None:
            if self._running() >= key.concurrent_generations:
                raise self._all_running()

    def charge(self, generations: int, tokens: int) -> Charge:
        """Count the generations of a request as running, and the most tokens that it may take.

        The caller closes the charge at the end of the request.

        Raises:
            ExceedsKeyLimit: this request alone is more than a limit allows.
            RateLimitExceeded: a limit is reached now. Nothing is counted.
        """
        self._check_fits(generations, tokens)
        limit = self._key.concurrent_generations
        self._table.changed(self._id)
        self._numbers[self._own + _RUNNING] += generations
        try:
            if limit is not None and self._running() > limit:
                raise self._too_many(generations, limit)
            slot = self._add("tokens", _TOKENS, tokens, self._key.tokens_per_minute)
        except RateLimitExceeded:
            self._numbers[self._own + _RUNNING] -= generations
            raise
        return Charge(self, generations, tokens, slot)

    def settle(self, charge: Charge, tokens: int) -> None:
        """Count the generations of a charge as ended, and the tokens that the request took."""
        self._table.changed(self._id)
        self._numbers[self._own + _RUNNING] -= charge.generations
        newest = self._advance()
        difference = tokens - charge.tokens
        if difference > 0:
            self._count(_TOKENS, newest, difference)
        elif charge.slot > newest - _NUM_SLOTS:
            # Unused tokens are subtracted in the slot where they were charged. In a later slot, the
            # negative number would still count after the charge has left the minute.
            self._count(_TOKENS, charge.slot, difference)

    def headers(self) -> dict[str, str]:
        """Return the response headers for the limits per minute, as OpenAI's API names them."""
        headers: dict[str, str] = {}
        now_s = self._table.clock()
        slot = int(now_s / SLOT_S)
        # After this time, nothing of what was counted so far is in the minute.
        reset = f"{(slot + _NUM_SLOTS) * SLOT_S - now_s:.1f}s"
        for sum_offset, limit, limit_text, (limit_name, remaining_name, reset_name) in self._limits:
            headers[limit_name] = limit_text
            headers[remaining_name] = str(max(0, limit - self._sum(sum_offset, slot)))
            headers[reset_name] = reset
        return headers

    # ----------------------------------------------------------------------------------------------

    def _rows(self) -> list[int]:
        """Return the places of this key's rows. The row of this process comes first."""
        if len(self._all_rows) < self._num_processes:
            self._all_rows = [self._own, *self._table.other_rows(self._id)]
        return self._all_rows

    def _add(self, what: str, sum_offset: int, count: int, limit: int | None) -> int:
        """Add a number to the current slot, and return this slot.

        Args:
            what: "requests" or "tokens", for the error.
            sum_offset: the offset of the sum of requests or of tokens in a row.
            count: the number that is added.
            limit: the limit per minute, or None if there is no limit.

        Raises:
            RateLimitExceeded: this would exceed the limit. Nothing is added.
        """
        slot = self._advance()
        self._count(sum_offset, slot, count)
        if limit is not None and self._sum(sum_offset, slot) > limit:
            self._count(sum_offset, slot, -count)
            raise self._exceeded(what, sum_offset, count, limit)
        return slot

    def _count(self, sum_offset: int, slot: int, count: int) -> None:
        """Add a number to a slot of the minute, and to the sum of the minute."""
        self._table.changed(self._id)
        self._numbers[self._own + sum_offset] += count
        self._numbers[self._own + sum_offset + 1 + slot % _NUM_SLOTS] += count

    def _slot(self) -> int:
        return int(self._table.clock() / SLOT_S)

    def _advance(self) -> int:
        """Return the current slot, and clear the places of slots that are new since the last call.

        Each slot takes the place of the slot before the minute.
        """
        numbers = self._numbers
        own = self._own
        slot = self._slot()
        newest = numbers[own + _NEWEST]
        if slot <= newest:
            return slot
        # A row has places for _NUM_SLOTS slots, so each place is cleared once at most.
        first_of_minute = slot - _NUM_SLOTS + 1
        first_new = max(newest + 1, first_of_minute)
        for passed in range(first_new, slot + 1):
            for sum_offset in (_REQUESTS, _TOKENS):
                place = own + sum_offset + 1 + passed % _NUM_SLOTS
                numbers[own + sum_offset] -= numbers[place]
                numbers[place] = 0
        numbers[own + _NEWEST] = slot
        return slot

    def _sum(self, sum_offset: int, slot: int) -> int:
        """Return the sum over the minute that ends with a slot, of all processes and frontends.

        Args:
            sum_offset: offset of the sum of requests or of tokens in a row.
            slot: the current slot, or a later slot.
        """
        others = self._table.others.total(self._id)
        total = others.requests if sum_offset == _REQUESTS else others.tokens
        # This runs five times per request. Most times, there is one row, and its newest slot is
        # this slot.
        numbers = self._numbers
        for row in self._rows():
            if numbers[row + _NEWEST] == slot:
                total += numbers[row + sum_offset]
            else:
                total += self._table.minute(row, sum_offset, slot)
        return total

    def _running(self) -> int:
        total = self._table.others.total(self._id).running
        for row in self._rows():
            total += self._numbers[row + _RUNNING]
        return total

    def _check_fits(self, generations: int, tokens: int) -> None:
        """Raise ExceedsKeyLimit if a request of this size would exceed a limit at any time."""
        limit = self._key.tokens_per_minute
        if limit is not None and tokens > limit:
            raise ExceedsKeyLimit(
                f"the prompt and the output of this request may take {tokens} tokens, which is"
                f" {tokens - limit} more than the {limit} tokens per minute of its API key; send a"
                " shorter prompt, or lower max_tokens or n"
            )
        limit = self._key.concurrent_generations
        if limit is not None and generations > limit:
            raise ExceedsKeyLimit(
                f"the request has {generations} choices, which is {generations - limit} more than"
                f" the {limit} concurrent generations of its API key; lower n or send fewer"
                " prompts",
                field="n",
            )

    def _exceeded(self, what: str, sum_offset: int, count: int, limit: int) -> RateLimitExceeded:
        """Return the error of a limit per minute. It names when `count` more will fit."""
        now_s = self._table.clock()
        slot = int(now_s / SLOT_S)
        left_s = _WINDOW_S
        # Find the first later slot at which enough of the oldest slots have left the minute.
        for later in range(slot + 1, slot + _NUM_SLOTS + 1):
            if self._sum(sum_offset, later) + count <= limit:
                left_s = later * SLOT_S - now_s
                break
        retry_s = max(1, math.ceil(left_s))
        return RateLimitExceeded(
            f"the limit of this API key is reached: {limit} {what} per minute; try again in"
            f" {retry_s} s",
            retry_after_s=retry_s,
            headers=self.headers(),
        )

    def _all_running(self) -> RateLimitExceeded:
        return RateLimitExceeded(
            f"this API key already runs {self._key.concurrent_generations} generations, its limit;"
            " try again when one has ended",
            retry_after_s=_RETRY_S,
            headers=self.headers(),
        )

    def _too_many(self, generations: int, limit: int) -> RateLimitExceeded:
        """Return the error of a request with more generations than this key may add now."""
        if generations == 1:
            return self._all_running()
        return RateLimitExceeded(
            f"the request has {generations} choices, and this API key may run {limit} at once,"
            " including those of its other requests; try again when these have ended, or lower n",
            retry_after_s=_RETRY_S,
            headers=self.headers(),
        )


class Charge:
    """The generations and tokens that are counted for a running request."""

    def __init__(self, usage: KeyUsage, generations: int, tokens: int, slot: int) -> None:
        self._usage: KeyUsage | None = usage
        self.generations = generations
        self.tokens = tokens
        self.slot = slot  # the slot in which the tokens were counted

    def close(self, tokens: int) -> None:
        """Replace the charge by the tokens that the request took. Idempotent."""
        if self._usage is not None:
            self._usage.settle(self, tokens)
            self._usage = None
