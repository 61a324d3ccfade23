"""`python -m dynamo_trtllm.preflight`: from files and flags to findings and a memory estimate. Loads nothing."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dynamo_trtllm.cli import preflight_report
from dynamo_trtllm.cli.preflight_report import Report, RoleReport
from dynamo_trtllm.config.layers import find_file, read_yaml
from dynamo_trtllm.config.load import exit_with, load
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.config.preflight import PreflightConfig
from dynamo_trtllm.engines.base import Finding
from dynamo_trtllm.engines.checkpoint import Checkpoint, read_checkpoint
from dynamo_trtllm.engines.gpu import Gpu, visible_gpus
from dynamo_trtllm.engines.known_models import SHAPES
from dynamo_trtllm.engines.torch.args import TorchArgs
from dynamo_trtllm.engines.trtllm import schema
from dynamo_trtllm.engines.trtllm.api_manifests import ApiManifest, release_for
from dynamo_trtllm.engines.trtllm.args import TrtllmArgs, trtllm_args
from dynamo_trtllm.engines.trtllm.preflight import Load, RoleFacts, check_pair, check_role, memory_table
from dynamo_trtllm.engines.trtllm.preflight.gpus import known_gpu
from dynamo_trtllm.engines.trtllm.preflight.memory import transfer_s
from dynamo_trtllm.engines.vllm import manifest
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.messages import Role

PROG = "python -m dynamo_trtllm.preflight"
_DESCRIPTION = (
    "Judges TensorRT-LLM arguments before anything loads: each role alone, the pair, and the memory it takes."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """What all roles are judged for."""

    release: ApiManifest
    model: Checkpoint | None
    gpu: Gpu | None
    load: Load


def main(argv: Sequence[str] | None = None) -> None:
    """Exit status: 0 without errors, 1 with errors among the findings, 2 for a bad command line."""
    try:
        config = load(PreflightConfig, prog=PROG, description=_DESCRIPTION, argv=argv).config
        report = evaluate(config)
    except ConfigError as exc:
        exit_with(PROG, exc)
    sys.stdout.write(preflight_report.as_json(report) if config.json_output else preflight_report.as_text(report))
    raise SystemExit(1 if report.count("error") else 0)


def evaluate(config: PreflightConfig) -> Report:
    """Raises ConfigError for what can't be judged: files, names and flags that are not there."""
    ground = _Target(
        release=release_for(config.release),
        model=_model(config.model_path),
        gpu=_gpu(config.gpu),
        load=Load(isl=config.isl, osl=config.osl, concurrency=config.concurrency),
    )
    roles = [
        _judged(role, path, flags, config, ground)
        for role, path, flags in (
            (Role.PREFILL, config.prefill, config.prefill_args),
            (Role.DECODE, config.decode, config.decode_args),
            (Role.AGGREGATED, config.agg, config.agg_args),
        )
        if path is not None
    ]
    report = Report(release=config.release, gpu=ground.gpu.name if ground.gpu else None, roles=tuple(roles))
    known = [judged.facts for judged in roles if judged.facts is not None]
    if len(known) < 2:
        return report
    prefill, decode = known
    prompt = prefill.longest_prompt
    return replace(
        report,
        pair=tuple(check_pair(prefill, decode)),
        handoff_tokens=prompt,
        handoff_s={} if prompt is None else transfer_s(prefill, decode, prompt),
    )


def _judged(role: Role, path: Path, flags: str | None, config: PreflightConfig, ground: _Target) -> RoleReport:
    """Arguments that the release refuses are a finding too: the file is at fault, not the command line."""
    if not find_file(path).is_file():
        raise ConfigError(f"there is no file {path}", field=str(role))
    worker = _worker(role, path, flags, config)
    gpus = [ground.gpu] * 8 if ground.gpu else []
    try:
        args = trtllm_args(worker, ground.release, gpus)
    except ConfigError as exc:
        _check_engine_of(path)
        return RoleReport(role=role, facts=None, notes=(), findings=(_refused(exc, path),), memory=None)
    facts = _facts(role, args, worker, config, ground)
    return RoleReport(
        role=role, facts=facts, notes=args.notes, findings=tuple(check_role(facts)), memory=memory_table(facts)
    )


def _check_engine_of(path: Path) -> None:
    """Raise ConfigError when half of the arguments or more are not TensorRT-LLM's, and another engine has one."""
    others: dict[str, Callable[[str], bool]] = {
        "vllm": lambda key: manifest.find(key) is not None,
        "torch": lambda key: key in TorchArgs.model_fields,
    }
    try:
        given = read_yaml(find_file(path))
    except ConfigError:
        return  # that it can't be read is already the finding
    keys = [key for key in given if not schema.is_known(key)]
    if 2 * len(keys) < len(given):
        return
    for engine, has in others.items():
        if found := next((key for key in keys if has(key)), None):
            raise ConfigError(
                f"preflight checks TensorRT-LLM files only, and {path} is a file for --engine {engine} ({found}); to "
                f"check it: python -m dynamo_trtllm --engine {engine} --model-path MODEL --extra-engine-args {path} "
                "--print-config",
                field=found,
            )


def _worker(role: Role, path: Path, flags: str | None, config: PreflightConfig) -> WorkerConfig:
    """What the worker would read from its own command line; this process's environment is not its."""
    fixed = [
        f"--model-path={config.model_path or 'model'}",
        "--engine=trtllm",
        f"--extra-engine-args={path}",
        f"--disaggregation-mode={role}",
    ]
    try:
        words = shlex.split(flags or "")
    except ValueError as exc:
        raise ConfigError(f"the flags of the {role} worker can't be read: {exc}") from exc
    try:
        return load(WorkerConfig, prog=PROG, description=_DESCRIPTION, argv=[*fixed, *words], environ={}).config
    except ConfigError as exc:
        raise ConfigError(f"the flags of the {role} worker: {exc.message}", field=exc.field) from exc


def _facts(role: Role, args: TrtllmArgs, worker: WorkerConfig, config: PreflightConfig, ground: _Target) -> RoleFacts:
    return RoleFacts(
        role=role,
        args=args,
        release=config.release,
        model=ground.model,
        gpu=ground.gpu,
        load=ground.load,
        environment=args.profile.environment,
        strategy=worker.disaggregation_strategy,
    )


def _refused(error: ConfigError, path: Path) -> Finding:
    return Finding(
        severity="error",
        rule="argument-refused",
        field=error.field or "",
        value=str(path),
        why=error.message,
        cure="change what the message names",
    )


def _model(name: str | None) -> Checkpoint | None:
    if name is None:
        return None
    plain = name.removeprefix("openai/")
    if plain in SHAPES and not Path(name).is_dir():
        return SHAPES[plain]
    return read_checkpoint(Path(name).expanduser())


def _gpu(name: str | None) -> Gpu | None:
    """Without a name this machine's, where it has one kind."""
    if name is not None:
        known = known_gpu(name.lower())
        return Gpu(name=known.name, sm=known.sm, memory_bytes=known.memory_bytes)
    here = visible_gpus()
    return here[0] if here else None
