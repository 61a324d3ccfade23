"""Ask the processes of a deployment on all machines for their recordings.

The times in the recordings are converted to the clock of this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing, suppress
from typing import Final

from dynamo_trtllm.cli.launched_servers import with_servers_of
from dynamo_trtllm.cluster.discovery.etcd_store import EtcdStore
from dynamo_trtllm.cluster.discovery.records import BadRecord, namespace_prefix, read_instance
from dynamo_trtllm.cluster.request_plane.nats import NatsTransport
from dynamo_trtllm.cluster.request_plane.nats_connection import NatsAccess
from dynamo_trtllm.config.commands import ExplainConfig
from dynamo_trtllm.launch.running_deployments import LaunchRecord
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.observability.recording_queries import RecordingQueries
from dynamo_trtllm.observability.recording_server import (
    KeySelector,
    RecordingQuery,
    Selection,
)
from dynamo_trtllm.observability.recordings import (
    ProcessRecording,
    Recordings,
    RequestIds,
)
from dynamo_trtllm.protocol.errors import PlaneError, UserRejected
from dynamo_trtllm.protocol.messages import Instance
from dynamo_trtllm.protocol.sanitize import mask_address

_SUBSCRIBED_S: Final = 2.0  # the longest wait for NATS to confirm the subscription
_MAX_KEYS: Final = 50_000  # as many keys fit into one message


def with_other_machines(
    config: ExplainConfig, record: LaunchRecord | None, local: Recordings
) -> Recordings:
    """Return the recordings of this machine, and those that other machines and containers send.

    If etcd or NATS can't be reached or rejects this process, the result has only the recordings of
    this machine, and a line that says so.

    Args:
        config: the settings.
        record: the deployment to ask; None: the deployment that the settings name.
        local: the recordings of this machine.
    """
    observe_logging.setup(config.log_level, "explain", config.log_format)
    if record is not None:
        config = with_servers_of(config, record)
    try:
        return asyncio.run(_gather(config, local))
    except UserRejected as exc:
        line = f"{exc.message}; only files of this machine are read (--local)"
        return Recordings(local.processes, [*local.problems, line])
    except (PlaneError, TimeoutError) as exc:
        if isinstance(exc, TimeoutError) or exc.field == "etcd_endpoints":
            name = "etcd"
            address = config.etcd_endpoints
            flag = "--etcd-endpoints"
        else:
            name = "NATS"
            address = config.nats_server
            flag = "--nats-server"
        line = (
            f"no {name} answers at {mask_address(address)}, so only files of this machine are read;"
            f" pass {flag} or --local"
        )
        return Recordings(local.processes, [*local.problems, line])


async def _gather(config: ExplainConfig, local: Recordings) -> Recordings:
    """Return the recordings of this machine, and of other processes that answer."""
    async with asyncio.timeout(config.timeout_s), aclosing(EtcdStore(config)) as store:
        records = (await store.read_all(namespace_prefix(config.namespace))).records
    transport = NatsTransport(config.nats_server, access=NatsAccess.of(config))
    await transport.connect(config.timeout_s)
    try:
        # A user of another role, such as that of a worker, would get no answers.
        await transport.until_subscribed(min(config.timeout_s, _SUBSCRIBED_S))
        queries = RecordingQueries(
            transport, config.namespace, _instances(records, local), config.timeout_s
        )
        selection = _selection(config)
        if config.request is not None:
            ids = RequestIds.parse(config.request)
        else:
            ids = RequestIds(keys=frozenset(), prefix=-1, client_id=0)  # ids of no request
        # Processes whose files were read here need not answer.
        known = [process.header.epoch_ns for process in local.processes]
        query = RecordingQuery(
            inbox="",  # `ask` chooses it
            selection=selection,
            keys=sorted(ids.keys),
            prefix=ids.prefix,
            client_id=ids.client_id,
            known=known,
        )
        await queries.ask(query)
        named = _keys(query, [*local.processes, *queries.processes()])
        # Ask all processes again, for what each knows of the requests that any process has named.
        if selection is not Selection.ALL and named - ids.keys:
            asked = sorted(named)[:_MAX_KEYS]
            again = RecordingQuery(inbox="", selection=Selection.GIVEN, keys=asked, known=known)
            await queries.ask(again)
            if len(asked) < len(named):
                queries.problems.append(
                    f"other machines were asked for {len(asked)} of {len(named)} requests"
                )
        await queries.read_clocks()
        return queries.result(local)
    finally:
        await transport.aclose()


def _selection(config: ExplainConfig) -> Selection:
    if config.request is not None:
        return Selection.GIVEN
    if config.stuck:
        return Selection.OPEN
    if config.perfetto is not None or config.trace is not None:
        return Selection.ALL
    return Selection.LATEST


def _keys(query: RecordingQuery, processes: list[ProcessRecording]) -> set[int]:
    """Return the requests of these processes that a query wants."""
    found = set[int]()
    for process in processes:
        selector = KeySelector(query)
        for entry in process.entries:
            if entry.key:
                selector.add_event(entry.key, entry.event, entry.ns, entry.a)
        found |= selector.keys()
    return found


def _instances(records: Mapping[str, bytes], local: Recordings) -> dict[int, Instance]:
    """Return the registered workers without a recording of this machine."""
    found = {}
    for key, record in records.items():
        with suppress(BadRecord):  # `status` shows such a record
            instance = read_instance(key, record)
            if local.instance(instance.id) is None:
                found[instance.id] = instance
    return found
