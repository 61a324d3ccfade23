"""Describe a worker: the instance that it registers, and the limits of its work."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dynamo_trtllm import __version__
from dynamo_trtllm.cluster.discovery import records
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.engine_interface import EngineInfo
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import (
    WIRE_VERSION,
    Instance,
    Limits,
    ModelDeploymentCard,
    Role,
    SamplingDefaults,
)
from dynamo_trtllm.protocol.shares import Shares
from dynamo_trtllm.worker.card import (
    digest,
    parser_names,
    with_custom_template,
    without_unsupported,
)
from dynamo_trtllm.worker.timing import WorkerTiming
from dynamo_trtllm.worker.worker_admission import WorkerAdmission

# The share of the KV blocks that may await transfer, see `WorkerAdmission`.
_MAX_PENDING_TRANSFER_FRACTION = 0.5


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
        endpoint: the endpoint that the worker serves.
        instance_id: the id of the worker.
        info: the properties of its engine, which has started.
        sampling_defaults: the sampling defaults of the model.
    """
    limits = info.limits
    if config.disaggregation_mode is Role.ELASTIC:
        limits = _elastic_limits(config, info)
    files = with_custom_template(config, info.renderer, info.files)
    digests = {name: digest(path) for name, path in files.items()}
    card = ModelDeploymentCard(
        name=config.model_name,
        context_length=info.context_length,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        renderer=info.renderer,
        **parser_names(config, info.renderer),
        unsupported_features=info.unsupported_features,
        files=digests,
        sampling_defaults=without_unsupported(sampling_defaults, info.unsupported_features),
    )
    instance = Instance(
        id=instance_id,
        **endpoint._asdict(),
        subject=records.subject(endpoint, instance_id),
        role=config.disaggregation_mode,
        engine=info.engine,
        card=card,
        layout=info.layout,
        limits=limits,
        kv_compat=info.kv_compat,
        can_aggregate=info.can_aggregate,
        supported_features=info.supported_features,
        keeps_unfetched_kv=info.keeps_unfetched_kv,
        strategy=config.disaggregation_strategy,
        version=__version__,
        wire=WIRE_VERSION,
        publishes_kv_events=config.publish_kv_events,
        reuses_prefixes=info.reuses_prefixes,
        signs_kv_transfers=config.kv_transfer_key_file is not None,
        kv_addresses=info.kv_addresses,
        shares=Shares(config.prefill_share, config.decode_share),
    )
    return instance, {digests[name]: path for name, path in files.items()}


def _elastic_limits(config: WorkerConfig, info: EngineInfo) -> Limits:
    """Return the limits of an elastic worker, with the limit of KV that it holds for other workers.

    Raises:
        ConfigError: the engine can't run an elastic worker.
    """
    limits = info.limits
    missing = ""
    if not info.can_aggregate:
        missing = "whole requests in every role"
    if not limits.kv_blocks:
        missing = "a known number of KV blocks"
    if missing:
        raise ConfigError(
            f"--disaggregation-mode {Role.ELASTIC} needs {missing}, which engine {info.engine} does"
            f" not have; use another --disaggregation-mode",
            field="disaggregation_mode",
        )
    max_blocks = max(1, int(config.max_transfer_kv_fraction * limits.kv_blocks))
    # The engine may have space for fewer blocks in its transfer buffer.
    if limits.max_transfer_blocks:
        max_blocks = min(max_blocks, limits.max_transfer_blocks)
    return msgspec.structs.replace(limits, max_transfer_blocks=max_blocks)


def admission_of(config: WorkerConfig, instance: Instance, timing: WorkerTiming) -> WorkerAdmission:
    """Return the limits of a worker's work."""
    limits = instance.limits
    max_active: int | None = None
    max_batch_size = limits.max_batch_size  # 0: not reported by the engine
    if max_batch_size:
        max_active = max_batch_size + config.max_queued_requests
    max_transfer_blocks: int | None = None
    if instance.role is Role.ELASTIC:
        max_transfer_blocks = limits.max_transfer_blocks
    return WorkerAdmission(
        max_active=max_active,
        max_pending_kv_fraction=_MAX_PENDING_TRANSFER_FRACTION,
        max_transfer_blocks=max_transfer_blocks,
        block_tokens=instance.layout.block_tokens,
        timing=timing,
    )
