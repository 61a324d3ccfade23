"""Start a worker's engine: check flags and parsers, run preflight against live peers, and report
the progress of loading.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

import msgspec

from dynamo_trtllm import models as bundled_models
from dynamo_trtllm.cluster.discovery.discovery_interface import Added, Discovery, Synced
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.capabilities import ReportsProgress, RunsPreflight
from dynamo_trtllm.engines.engine_interface import Engine, EngineInfo, Finding
from dynamo_trtllm.models.checkpoint import CONFIG, TEMPLATE, read_sampling_defaults, renderer_of
from dynamo_trtllm.models.parser_names import PARSERS
from dynamo_trtllm.protocol.errors import ConfigError, InvalidRequest
from dynamo_trtllm.protocol.messages import FileChunk, Instance, Role, SamplingDefaults
from dynamo_trtllm.worker.health import Health
from dynamo_trtllm.worker.timing import TIMING, WorkerTiming

log = logging.getLogger(__name__)

# Values of sampling parameters that have no effect.
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def sampling_defaults(config: WorkerConfig, model: str) -> SamplingDefaults:
    """Return the sampling defaults for --generation-config. May read generation_config.json.

    Args:
        config: the settings, with `model_path` set to the folder of the model.
        model: --model-path as the user set it, which may be the name of a bundled model.

    Raises:
        ConfigError: the file has an invalid value.
    """
    if config.generation_config == "none":
        return SamplingDefaults()
    bundled = bundled_models.sampling_defaults(model)
    if bundled is not None:
        return bundled
    return read_sampling_defaults(Path(config.model_path))


def without_unsupported(
    defaults: SamplingDefaults, unsupported_features: Collection[str]
) -> SamplingDefaults:
    """Return the defaults without those that the engine does not support, because each request with
    an unsupported field would fail.

    Log a warning about dropped defaults that have an effect.
    """
    dropped = [name for name in defaults.given() if name in unsupported_features]
    effective = [name for name in dropped if getattr(defaults, name) != _NEUTRAL.get(name)]
    if effective:
        text = (
            "generation config: %s ignored, this engine does not support it; --generation-config"
            " none turns all off"
        )
        log.warning(text, ", ".join(effective))
    unset: dict[str, None] = dict.fromkeys(dropped)
    return msgspec.structs.replace(defaults, **unset)


def check_flags(config: WorkerConfig, *, reads_model: bool) -> None:
    """Check the flags of parsers and template before the model is loaded.

    Parsers and template must also fit the model. This is checked only if the model's folder shows
    the format of the model.

    Args:
        config: settings with the flags.
        reads_model: True if `model_path` is the model's folder.

    Raises:
        ConfigError: the template can't be read, or a flag does not fit the model, see `parsers` and
            `with_template`.
    """
    template = config.custom_jinja_template
    if template is not None:
        _check_template(template)
    flags = config.dyn_reasoning_parser, config.dyn_tool_call_parser, template
    if not reads_model or not any(flags):
        return
    config_file = Path(config.model_path) / CONFIG
    try:
        model_type = json.loads(config_file.read_bytes())["model_type"]
    except (OSError, ValueError, TypeError, KeyError):
        # The engine reports an unreadable model.
        return
    renderer = renderer_of(model_type)
    # These calls are made only for their errors. Their results are not needed here.
    parsers(config, renderer)
    with_template(config, renderer, {})


def _check_template(path: Path) -> None:
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"--custom-jinja-template {path} can't be read: {reason}; pass a file with a chat"
            " template",
            field="custom_jinja_template",
        ) from exc


def with_template(
    config: WorkerConfig, renderer: str, files: Mapping[str, Path]
) -> dict[str, Path]:
    """Return the files that frontends fetch, by their names.

    The template of --custom-jinja-template replaces the template of the model.

    Args:
        config: settings with the flag.
        renderer: "harmony" or "chat_template".
        files: tokenizer and template files of the model.

    Raises:
        ConfigError: the model's format has no template.
    """
    template = config.custom_jinja_template
    if template is None:
        return dict(files)
    if renderer == "harmony":
        raise ConfigError(
            f"--custom-jinja-template {template} has no effect on this model, which uses the"
            " Harmony format; leave the flag out",
            field="custom_jinja_template",
        )
    return {**files, TEMPLATE: template}


def parsers(config: WorkerConfig, renderer: str) -> dict[str, str]:
    """Return the names of the model's parsers by field of the card.

    Args:
        config: settings with the parser flags.
        renderer: "harmony" or "chat_template".

    Raises:
        ConfigError: a parser does not fit the model's format; the error names the flag.
    """
    names = {}
    for field, known in PARSERS[renderer].items():
        chosen = getattr(config, f"dyn_{field}")
        name = known[0] if chosen is None else chosen
        names[field] = name
        if name not in known:
            flag = f"--dyn-{field.replace('_', '-')}"
            format_name = "the Harmony format" if renderer == "harmony" else "a chat template"
            raise ConfigError(
                f"{flag} {chosen} does not fit this model, which uses {format_name}; choose one of"
                f" {', '.join(known)}, or leave the flag out",
                field=f"dyn_{field}",
            )
    return names


_PEER_ROLES = {
    Role.PREFILL: (Role.DECODE, Role.ELASTIC),
    Role.DECODE: (Role.PREFILL, Role.ELASTIC),
    Role.ELASTIC: (Role.PREFILL, Role.DECODE, Role.ELASTIC),
}
_LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "note": logging.INFO}


async def live_peers(
    discovery: Discovery, namespace: str, *, model: str, role: Role
) -> list[Instance]:
    """Return the registered instances of the same model that exchange KV with this role.

    Raises:
        Unreachable: discovery does not answer. Without this error, the worker would load for
            minutes before it fails to register.
    """
    instances: list[Instance] = []
    async with aclosing(discovery.watch(namespace)) as events:
        async for event in events:
            if isinstance(event, Synced):
                break
            if isinstance(event, Added):
                instances.append(event.instance)
    peer_roles = _PEER_ROLES.get(role, ())
    return [peer for peer in instances if peer.card.name == model and peer.role in peer_roles]


async def preflight(engine: Engine, peers: Sequence[Instance]) -> None:
    """Run the engine's preflight checks, and log each problem.

    Args:
        engine: the engine, not started yet.
        peers: live workers that exchange KV with this one.

    Raises:
        ConfigError: a problem has severity error.
    """
    if not isinstance(engine, RunsPreflight):
        return
    findings = await asyncio.to_thread(engine.preflight, peers)
    for finding in findings:
        log.log(
            _LEVELS[finding.severity],
            "preflight: %s: %s",
            finding.severity,
            format_finding(finding),
        )
    errors = [finding for finding in findings if finding.severity == "error"]
    if not errors:
        return
    first = errors[0]
    more = f" (and {len(errors) - 1} more, see the log)" if len(errors) > 1 else ""
    raise ConfigError(f"preflight: {format_finding(first)}{more}", field=first.field)


def format_finding(finding: Finding) -> str:
    """Return a preflight problem in one line."""
    against = f" against {finding.other}" if finding.other else ""
    return (
        f"{finding.field} {finding.value}{against}: {finding.why}; {finding.fix} [{finding.rule}]"
    )


# The numbers in the progress of an engine, which change within a stage of loading.
_NUMBERS = re.compile(r"[\d.]+")


async def start_engine(engine: Engine, health: Health, timing: WorkerTiming = TIMING) -> EngineInfo:
    """Start an engine, with its progress in `health.reason` and in the log.

    Raises the errors of `Engine.start`.
    """
    starting = asyncio.create_task(engine.start(), name="engine-start")
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    logged_s = begun_s
    logged_stage = ""
    try:
        while not starting.done():
            progress = engine.progress() if isinstance(engine, ReportsProgress) else ""
            health.reason = progress
            stage = _NUMBERS.sub("", progress)
            is_due = stage != logged_stage or loop.time() - logged_s >= timing.loading_log_s
            if progress and is_due:
                log.info("loading for %.0f s: %s", loop.time() - begun_s, progress)
                logged_stage = stage
                logged_s = loop.time()
            await asyncio.wait({starting}, timeout=timing.loading_poll_s)
        info = starting.result()
    finally:
        health.reason = ""
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    if not isinstance(info, EngineInfo):
        raise ConfigError(
            f"{type(engine).__qualname__}.start returned {info!r}; it must return an EngineInfo",
            field="engine",
        )
    return info


FILE_CHUNK_BYTES = 512 << 10  # less than the default limit of NATS, 1 MiB


def digest(path: Path) -> str:
    """Return the content hash (SHA-256, hexadecimal) with which frontends request a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def file_chunk(files_by_sha256: Mapping[str, Path], sha256: str, offset: int) -> FileChunk:
    """Return a part of one of the card's files.

    Raises InvalidRequest if the worker has no such file.
    """
    path = files_by_sha256.get(sha256)
    if path is None:
        raise InvalidRequest(f"this worker has no file {sha256}", field="sha256")
    total_bytes = path.stat().st_size
    with path.open("rb") as file:
        # A file system may reject very large offsets.
        file.seek(min(offset, total_bytes))
        return FileChunk(data=file.read(FILE_CHUNK_BYTES), total_bytes=total_bytes)
