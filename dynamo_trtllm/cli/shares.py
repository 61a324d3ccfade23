"""Show and set the shares of elastic workers (`dynamo-trtllm shares`)."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from dynamo_trtllm.cli.launched_servers import with_launched_servers
from dynamo_trtllm.cluster.connect import open_discovery
from dynamo_trtllm.cluster.discovery.discovery_interface import Discovery, StoredShares
from dynamo_trtllm.cluster.discovery.share_changes import change_shares, elastic_workers
from dynamo_trtllm.cluster.discovery.share_records import share_key
from dynamo_trtllm.config.commands import SharesConfig
from dynamo_trtllm.config.load import command
from dynamo_trtllm.config.parser import COMMAND_NAME
from dynamo_trtllm.config.shares import ALL, parse_shares
from dynamo_trtllm.config.text_table import format_table
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.protocol.errors import Overloaded, Unreachable, VersionMismatch
from dynamo_trtllm.protocol.messages import Instance
from dynamo_trtllm.protocol.sanitize import escape_controls
from dynamo_trtllm.protocol.shares import ShareChange, Shares, ShareTable
from dynamo_trtllm.support.background import BackgroundTasks


@command(SharesConfig, f"{COMMAND_NAME} shares", Unreachable, Overloaded, VersionMismatch)
def main(config: SharesConfig) -> int:
    """Run the command.

    Exit with status 0; 1 if etcd is unreachable, a worker is not registered, or there is no elastic
    worker; and 2 for a bad command line.
    """
    observe_logging.setup(config.log_level, "shares", config.log_format)
    config = with_launched_servers(config, config.deployment_name, uses_nats=False)
    return asyncio.run(_run(config))


async def _run(config: SharesConfig) -> int:
    async with aclosing(open_discovery(config, BackgroundTasks())) as discovery:
        workers = await elastic_workers(discovery, config.namespace)
        if not workers:
            _note(
                f"namespace {config.namespace} has no elastic worker; start workers with"
                " --disaggregation-mode elastic"
            )
            return 1
        if config.set_shares and not await _set(config, discovery, workers):
            return 1
        stored = await discovery.read_shares(config.namespace)
    if config.json_output:
        text = _as_json(workers, stored)
    elif config.history:
        text = _history(stored)
    else:
        text = _table(workers, stored)
    sys.stdout.write(text)
    if stored.problem:
        _note(
            f"the record {share_key(config.namespace)} is invalid, and frontends use the shares"
            f" before it: {stored.problem}; {stored.remedy}"
        )
    return 0


async def _set(config: SharesConfig, discovery: Discovery, workers: list[Instance]) -> bool:
    """Set the shares of the command line. Return False if a worker is not registered."""
    registered = {worker.id: worker.shares for worker in workers}
    changes: dict[int, Shares] = {}
    for text in config.set_shares:
        setting = parse_shares(text)
        if setting.worker == ALL:
            changes |= dict.fromkeys(registered, setting.shares)
            continue
        instance_id = int(setting.worker, 16)
        if instance_id not in registered:
            _note(
                f"{setting.worker} is no elastic worker of namespace {config.namespace}; these are:"
                f" {', '.join(f'{worker.id:x}' for worker in workers)}"
            )
            return False
        changes[instance_id] = setting.shares
    await change_shares(
        discovery,
        config.namespace,
        changes,
        registered=registered,
        reason=config.reason,
        writer=f"shares on {socket.gethostname()}",
    )
    return True


def _shares_of(worker: Instance, table: ShareTable | None) -> Shares:
    """Return the shares of a worker: those of the table, or those it has registered."""
    return worker.shares if table is None else table.workers.get(worker.id, worker.shares)


def _table(workers: list[Instance], stored: StoredShares) -> str:
    rows = [("worker", "model", "prefill share", "decode share", "set by")]
    table = stored.table
    # Frontends that were running when an invalid table was written have the shares before it.
    by_worker = "the worker, or a table before" if stored.problem else "the worker"
    for worker in workers:
        shares = _shares_of(worker, table)
        is_set = table is not None and worker.id in table.workers
        rows.append(
            (
                f"{worker.id:x}",
                worker.card.name,
                f"{shares.prefill:g}",
                f"{shares.decode:g}",
                "the table" if is_set else by_worker,
            )
        )
    text = format_table(rows)
    if table is None:
        return text
    why = f": {escape_controls(table.reason)}" if table.reason else ""
    at = _time(table.written_at)
    return f"{text}revision {table.revision} of epoch {table.epoch}, {at}{why}\n"


def _history(stored: StoredShares) -> str:
    """Return the latest changes as text: one block each, the newest last."""
    table = stored.table
    if table is None or not table.history:
        return "no change of shares is known\n"
    return "\n".join(map(_change, table.history))


def _change(change: ShareChange) -> str:
    lines = [
        f"revision {change.revision} of epoch {change.epoch}, {_time(change.written_at)},"
        f" by {escape_controls(change.writer) or 'an unknown process'}"
    ]
    if change.reason:
        lines.append(f"  {escape_controls(change.reason)}")
    for instance_id, after in change.after.items():
        before = change.before.get(instance_id)
        was = "" if before is None else f"{_pair(before)} -> "
        lines.append(f"  worker {instance_id:x}: {was}{_pair(after)}")
    return "\n".join(lines) + "\n"


def _pair(shares: Shares) -> str:
    return f"{shares.prefill:g}/{shares.decode:g}"


def _time(epoch_s: float) -> str:
    return datetime.fromtimestamp(epoch_s, UTC).isoformat(timespec="seconds")


def _as_json(workers: list[Instance], stored: StoredShares) -> str:
    table = stored.table or ShareTable()
    value: dict[str, Any] = {
        "epoch": table.epoch,
        "revision": table.revision,
        "reason": table.reason,
        "workers": [
            {
                "id": f"{worker.id:x}",
                "model": worker.card.name,
                "prefill_share": _shares_of(worker, table).prefill,
                "decode_share": _shares_of(worker, table).decode,
            }
            for worker in workers
        ],
        "history": [_change_object(change) for change in table.history],
    }
    return f"{json.dumps(value)}\n"


def _change_object(change: ShareChange) -> dict[str, Any]:
    workers = [
        {
            "id": f"{instance_id:x}",
            "before": _pair(change.before.get(instance_id, after)),
            "after": _pair(after),
        }
        for instance_id, after in change.after.items()
    ]
    return {
        "epoch": change.epoch,
        "revision": change.revision,
        "written_at": _time(change.written_at),
        "writer": change.writer,
        "reason": change.reason,
        "workers": workers,
    }


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    main()
