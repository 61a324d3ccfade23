"""Describe a worker: the instance that it registers, and the limits of its work."""

from __future__ import annotations

from pathlib import Path

from dynamo_trtllm import __version__
from dynamo_trtllm.cluster.discovery import records
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.engine_interface import EngineInfo
from dynamo_trtllm.protocol.messages import (
    WIRE_VERSION,
    Instance,
    ModelDeploymentCard,
    SamplingDefaults,
)
from dynamo_trtllm.worker import startup
from dynamo_trtllm.worker.service import WorkerAdmission
from dynamo_trtllm.worker.timing import WorkerTiming

_MAX_PENDING_TRANSFER_FRACTION = 0.5  # of the KV blocks; see `WorkerAdmission`


def describe(
    config: WorkerConfig,
    endpoint: records.EndpointId,
    instance_id: int,
    info: EngineInfo,
    sampling_defaults: SamplingDefaults,
) -> tuple[Instance, dict[str, Path]]:
    """Return the instance to register, and the paths of the card's files by content hash.

    Args:
        config: settings of the worker.
        endpoint: the endpoint that it serves.
        instance_id: its id.
        info: what its engine has said when it started.
        sampling_defaults: those of the model.
    """
    files = startup.with_template(config, info.renderer, info.files)
    digests = {name: startup.digest(path) for name, path in files.items()}
    card = ModelDeploymentCard(
        name=config.model_name,
        context_length=info.context_length,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        renderer=info.renderer,
        **startup.parsers(config, info.renderer),
        unsupported_features=info.unsupported_features,
        files=digests,
        sampling_defaults=startup.without_unsupported(sampling_defaults, info.unsupported_features),
    )
    instance = Instance(
        id=instance_id,
        **endpoint._asdict(),
        subject=records.subject(endpoint, instance_id),
        role=config.disaggregation_mode,
        engine=info.engine,
        card=card,
        layout=info.layout,
        limits=info.limits,
        kv_compat=info.kv_compat,
        can_aggregate=info.can_aggregate,
        supported_features=info.supported_features,
        keeps_unfetched_kv=info.keeps_unfetched_kv,
        strategy=config.disaggregation_strategy,
        version=__version__,
        wire=WIRE_VERSION,
        publishes_kv_events=config.publish_kv_events,
        signs_kv_transfers=config.kv_transfer_key_file is not None,
        kv_addresses=info.kv_addresses,
    )
    return instance, {digests[name]: path for name, path in files.items()}


def admission_of(config: WorkerConfig, info: EngineInfo, timing: WorkerTiming) -> WorkerAdmission:
    """Return the limits of a worker's work."""
    max_active: int | None = None
    max_batch_size = info.limits.max_batch_size  # 0: not reported by the engine
    if max_batch_size:
        max_active = max_batch_size + config.max_queued_requests
    return WorkerAdmission(max_active, _MAX_PENDING_TRANSFER_FRACTION, timing=timing)
