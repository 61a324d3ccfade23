"""What a worker does around its engine's start: judge its arguments against the live peers, and tell how loading goes.

Decides nothing about requests, and registers nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Collection, Sequence
from contextlib import aclosing
from pathlib import Path

import msgspec

from dynamo_trtllm import demo_models
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.discovery.base import Added, Discovery, Synced
from dynamo_trtllm.engines.base import Engine, EngineInfo, Finding, HasPreflight, HasProgress
from dynamo_trtllm.engines.checkpoint import CONFIG, read_sampling_defaults, renderer_of
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.messages import Instance, Role, SamplingDefaults
from dynamo_trtllm.tokenization.base import PARSERS
from dynamo_trtllm.worker.health import Health

_log = logging.getLogger(__name__)

_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # change nothing


def sampling_defaults(config: WorkerConfig, model: str) -> SamplingDefaults:
    """Return what --generation-config asks for. Reads a file.

    Args:
        config: with `model_path` set to the model's folder.
        model: what the user gave as --model-path, which may be the name of a bundled model.

    Raises ConfigError for a value that can't be.
    """
    if config.generation_config == "none" or config.engine == "mock":  # the mock engine makes no choices
        return SamplingDefaults()
    return demo_models.sampling_defaults(model) or read_sampling_defaults(Path(config.model_path))


def without_unsupported(defaults: SamplingDefaults, unsupported_features: Collection[str]) -> SamplingDefaults:
    """Return the defaults that the engine supports: another one would make each request fail. Logs what is dropped."""
    dropped = [name for name in defaults.given() if name in unsupported_features]
    if missed := [name for name in dropped if getattr(defaults, name) != _NEUTRAL.get(name)]:
        _log.warning(
            "%s of the model's generation config is not applied: this engine does not support it", ", ".join(missed)
        )
    return msgspec.structs.replace(defaults, **dict.fromkeys(dropped))


def check_flags(config: WorkerConfig) -> None:
    """As `parsers`, before minutes of loading, where the model's folder tells its format."""
    if config.engine == "mock" or (config.dyn_reasoning_parser is None and config.dyn_tool_call_parser is None):
        return
    try:
        model_type = json.loads((Path(config.model_path) / CONFIG).read_bytes())["model_type"]
    except (OSError, ValueError, TypeError, KeyError):
        return  # the engine finds out what kind of model it is, or that it is none
    parsers(config, renderer_of(model_type))


def parsers(config: WorkerConfig, renderer: str) -> dict[str, str]:
    """By field of the card. Raises ConfigError, naming the flag, for one that the model's format does not have."""
    return {field: _parser(config, renderer, field) for field in ("reasoning_parser", "tool_call_parser")}


def _parser(config: WorkerConfig, renderer: str, field: str) -> str:
    known = PARSERS[renderer][field]
    chosen = getattr(config, f"dyn_{field}")
    if chosen is None:
        return known[0]
    if chosen not in known:
        flag = f"--dyn-{field.replace('_', '-')}"
        writes = "writes Harmony" if renderer == "harmony" else "has a chat template"
        raise ConfigError(
            f"{flag} {chosen}: this model {writes}, for which there are {', '.join(known)}; "
            "choose one or leave the flag out",
            field=f"dyn_{field}",
        )
    return str(chosen)


_LOOK_EVERY_S = 0.5  # engines are asked what they do, they do not tell
_SAY_EVERY_S = 30.0  # so that a long stage is not taken for a hang
_NUMBERS = re.compile(r"[\d.]+")  # they move on within a stage
_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
_LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "note": logging.INFO}


async def live_peers(discovery: Discovery, namespace: str, *, model: str, role: Role) -> list[Instance]:
    """The registered instances of the same model in the other role. Raises Unreachable, which costs less now than
    after loading."""
    found = []
    async with aclosing(discovery.watch(namespace)) as events:
        async for event in events:
            if isinstance(event, Synced):
                break
            if isinstance(event, Added):
                found.append(event.instance)
    return [peer for peer in found if peer.card.name == model and peer.role is _OTHER.get(role)]


async def preflight(engine: Engine, peers: Sequence[Instance]) -> None:
    """Logs each finding of an engine that can judge itself. Raises ConfigError when one is an error."""
    if not isinstance(engine, HasPreflight):
        return
    findings = await asyncio.to_thread(engine.preflight, peers)
    for finding in findings:
        _log.log(_LEVELS[finding.severity], "preflight: %s: %s", finding.severity, format_finding(finding))
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        more = f" (and {len(errors) - 1} more, on the log)" if len(errors) > 1 else ""
        raise ConfigError(f"preflight: {format_finding(errors[0])}{more}", field=errors[0].field)


def format_finding(finding: Finding) -> str:
    """A finding in one line."""
    against = f" against {finding.other}" if finding.other else ""
    return f"{finding.field} {finding.value}{against}: {finding.why}; {finding.cure} [{finding.rule}]"


async def start_engine(engine: Engine, health: Health) -> EngineInfo:
    """`engine.start_engine`, with what it is doing in `health` and on the log. Raises as it does."""
    if not isinstance(engine, HasProgress):
        return await engine.start()
    starting = asyncio.create_task(engine.start(), name="engine-start")
    try:
        await _report_progress(starting, engine, health)
        return starting.result()
    finally:
        health.reason = ""
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)


async def _report_progress(starting: asyncio.Task[EngineInfo], engine: HasProgress, health: Health) -> None:
    """Returns when `starting` is done."""
    loop = asyncio.get_running_loop()
    begun_s = said_s = loop.time()
    said = ""
    while not starting.done():
        health.reason = now = engine.progress()
        stage = _NUMBERS.sub("", now)
        if now and (stage != said or loop.time() - said_s >= _SAY_EVERY_S):
            _log.info("loading for %.0f s: %s", loop.time() - begun_s, now)
            said, said_s = stage, loop.time()
        await asyncio.wait({starting}, timeout=_LOOK_EVERY_S)
