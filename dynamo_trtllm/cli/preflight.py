"""Check engine arguments and estimate memory (`python -m dynamo_trtllm.preflight`).

The command loads no engine.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dynamo_trtllm.config.child_settings import to_argv
from dynamo_trtllm.config.commands import PreflightConfig
from dynamo_trtllm.config.deployment import load_deployment
from dynamo_trtllm.config.flags import ENV_PREFIX
from dynamo_trtllm.config.layers import find_file, read_yaml
from dynamo_trtllm.config.load import command, load, process_environment
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.config.parser import COMMAND_NAME
from dynamo_trtllm.engines import argument_schema as schema
from dynamo_trtllm.engines.engine_interface import Finding
from dynamo_trtllm.engines.gpu import Gpu, visible_gpus
from dynamo_trtllm.engines.preflight_rules import SEVERITIES
from dynamo_trtllm.engines.torch.args import TorchArgs
from dynamo_trtllm.engines.trtllm import api_manifests as trtllm_manifests
from dynamo_trtllm.engines.trtllm.args import trtllm_args
from dynamo_trtllm.engines.trtllm.preflight.checks import check_pair, check_role
from dynamo_trtllm.engines.trtllm.preflight.facts import Load, RoleFacts, known_gpu
from dynamo_trtllm.engines.trtllm.preflight.memory import (
    WORKSPACE_BYTES,
    MemoryTable,
    memory_table,
    transfer_s,
)
from dynamo_trtllm.engines.vllm import api_manifests as vllm_manifests
from dynamo_trtllm.models.checkpoint import SHAPES, Checkpoint, read_checkpoint
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.protocol.sanitize import escape_controls

# GPUs of the machine for which the arguments are checked.
_NUM_GPUS = 8


class CheckedWorker(NamedTuple):
    """A worker to check.

    Attributes:
        role: the role of the worker.
        file: file with its engine arguments; None: there is no such file.
        words: the other flags of the worker.
        where: the file that names the worker, for findings.
    """

    role: Role
    file: Path | None
    words: Sequence[str]
    where: Path


@dataclass(slots=True, kw_only=True)
class Report:
    """Result of a preflight check.

    Roles whose arguments TensorRT-LLM would reject are missing in the lists.
    """

    release: str
    gpu: str | None
    # The findings, each with its role or "pair". The findings of the pair are last.
    findings: list[tuple[str, Finding]] = field(default_factory=list)
    roles: list[RoleFacts] = field(default_factory=list)
    memory: list[tuple[RoleFacts, MemoryTable]] = field(default_factory=list)
    kv_transfer_tokens: int | None = None
    kv_transfer_s: Mapping[str, float] = field(default_factory=dict)

    def count(self, severity: str) -> int:
        return len([finding for _, finding in self.findings if finding.severity == severity])


def as_json(report: Report) -> str:
    """Format the report as JSON. Its keys are a public interface."""
    body: dict[str, Any] = {
        "release": report.release,
        "gpu": report.gpu,
        "errors": report.count("error"),
        "warnings": report.count("warning"),
        "findings": [{"role": role, **asdict(finding)} for role, finding in report.findings],
        "memory": [vars(table) for _, table in report.memory],
        "kv_transfer": {"tokens": report.kv_transfer_tokens, "seconds": dict(report.kv_transfer_s)},
    }
    return json.dumps(body, indent=2) + "\n"


def as_text(report: Report) -> str:
    """Format the report for a terminal."""
    blocks = [
        f"TensorRT-LLM {report.release} on {report.gpu or 'an unknown GPU (see --gpu)'}",
        *_findings(report),
        _arguments(report),
        _memory(report),
        _kv_transfer(report),
        f"{report.count('error')} errors, {report.count('warning')} warnings,"
        f" {report.count('note')} notes",
    ]
    text = "\n\n".join(block for block in blocks if block)
    # Values come from files, which may have characters that move a terminal's cursor.
    return "\n".join(escape_controls(line) for line in text.split("\n")) + "\n"


def _severity(finding: tuple[str, Finding]) -> int:
    """Return the sort key of a finding with its role: the most severe comes first."""
    return SEVERITIES.index(finding[1].severity)


def _findings(report: Report) -> Iterator[str]:
    for role, finding in sorted(report.findings, key=_severity):
        lines = [
            f"{finding.severity:<8} {role}: {finding.field}  [{finding.rule}]",
            finding.value,
        ]
        if finding.other:
            lines.append(finding.other)
        lines.append(f"why: {finding.why}")
        lines.append(f"fix: {finding.fix}")
        # The other lines are below the role, which follows the severity.
        yield "\n         ".join(lines)


def _arguments(report: Report) -> str:
    lines = []
    for facts in report.roles:
        lines += [f"  {facts.role}: {note}" for note in facts.args.notes]
    return "\n".join(["arguments:", *lines]) if lines else ""


_ROWS: Sequence[tuple[str, Callable[[MemoryTable], str]]] = (
    ("GPU memory", lambda table: _gib(table.gpu_bytes)),
    ("weights", lambda table: _gib(table.weights_bytes)),
    ("transfer buffers", lambda table: _gib(table.buffer_bytes)),
    ("workspace (rough)", lambda _: _gib(WORKSPACE_BYTES)),
    ("memory for KV", lambda table: _gib(table.kv_memory_bytes)),
    ("KV per token", lambda table: f"{table.kv_token_bytes / 1024:.1f} KiB"),
    ("  with windows freed", lambda table: f"{table.windowed_token_bytes / 1024:.1f} KiB"),
    ("KV blocks", lambda table: _count(table.blocks)),
    ("tokens of KV", lambda table: _count(table.pool_tokens)),
    ("tokens per request", lambda table: _count(table.request_tokens)),
    ("concurrent requests", lambda table: _concurrency(table)),
)


def _memory(report: Report) -> str:
    if not report.memory:
        return "Memory estimate skipped: pass --model."
    head = ["estimated memory per GPU"]
    for facts, _ in report.memory:
        gpus = "GPUs" if facts.tensor_parallel > 1 else "GPU"
        head.append(f"{facts.role}, {facts.tensor_parallel} {gpus}")
    rows = [head]
    for name, shown in _ROWS:
        cells = [shown(table) for _, table in report.memory]
        rows.append([name, *cells])
    return _aligned(rows)


def _kv_transfer(report: Report) -> str:
    if not report.kv_transfer_s:
        return ""
    rows = [[f"KV transfer of {report.kv_transfer_tokens} tokens at full rate", "time"]]
    rows += [[link, f"{seconds * 1000:.1f} ms"] for link, seconds in report.kv_transfer_s.items()]
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as lines. The first column is aligned left, all others are aligned right."""
    first_width, *other_widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(first_width), *map(str.rjust, others, other_widths)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / (1 << 30):.1f} GiB"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _concurrency(table: MemoryTable) -> str:
    return "-" if table.concurrency is None else f"{table.concurrency:,} (by {table.limited_by})"


@command(PreflightConfig, "python -m dynamo_trtllm.preflight")
def main(config: PreflightConfig) -> int:
    """Run the command.

    Exit with status 0 without errors, 1 with errors in the report, 2 for a bad command line.
    """
    report = evaluate(config)
    sys.stdout.write(as_json(report) if config.json_output else as_text(report))
    return 1 if report.count("error") else 0


def evaluate(config: PreflightConfig) -> Report:
    """Check the roles that the settings name, and the pair if there are two.

    Raises:
        ConfigError: a file, model, GPU, release or flag does not exist.
    """
    manifest = trtllm_manifests.release_for(config.release)
    checked, model_name = _from_deployment(config) if config.deployment else _from_flags(config)
    model = _model(model_name)
    gpu = _gpu(config.gpu)
    report = Report(release=config.release, gpu=gpu.name if gpu else None)
    for checked_worker in checked:
        worker = _worker(checked_worker, model_name)
        try:
            args = trtllm_args(worker, manifest, [gpu] * _NUM_GPUS if gpu else [])
        except ConfigError as exc:  # a finding, and not an error of this command line
            if checked_worker.file is not None:
                _check_engine_of(checked_worker.file)
            finding = _rejected(checked_worker.where, exc)
            report.findings.append((str(checked_worker.role), finding))
            continue
        facts = RoleFacts(
            role=checked_worker.role,
            args=args,
            release=config.release,
            model=model,
            gpu=gpu,
            load=Load(isl=config.isl, osl=config.osl, concurrency=config.concurrency),
            environment=args.profile.environment,
            strategy=worker.disaggregation_strategy,
        )
        _add_role(report, facts)
    if len(report.roles) == 2:
        prefill, decode = report.roles
        _add_pair(report, prefill, decode)
    return report


def _from_flags(config: PreflightConfig) -> tuple[list[CheckedWorker], str | None]:
    """Return the workers that flags name, and the name of the model."""
    checked = []
    for role, path, flags in (
        (Role.PREFILL, config.prefill, config.prefill_args),
        (Role.DECODE, config.decode, config.decode_args),
        (Role.AGGREGATED, config.agg, config.agg_args),
    ):
        if path is None:
            continue
        try:
            words = shlex.split(flags or "")
        except ValueError as exc:
            raise ConfigError(f"the flags of the {role} worker can't be parsed: {exc}") from exc
        checked.append(CheckedWorker(role=role, file=path, words=words, where=path))
    return checked, config.model_path


def _from_deployment(config: PreflightConfig) -> tuple[list[CheckedWorker], str | None]:
    """Return the workers of a deployment file, and the name of their model.

    The name is None if the files of the model are not on this machine.

    Raises:
        ConfigError: the file is not valid, has workers of another engine, or several groups of
            workers of one role.
    """
    path = Path(config.deployment or "")
    checked: dict[Role, CheckedWorker] = {}
    model_name = config.model_path
    for worker in load_deployment(path, process_environment()).workers:
        flags = dict(worker.flags)
        engine = flags.pop("engine", None)
        if engine not in (None, "trtllm"):
            raise ConfigError(
                f"preflight checks TensorRT-LLM workers only, but {worker.name} of {path} has"
                f" --engine {engine}; to check its arguments: {COMMAND_NAME} worker with its flags"
                " and --print-config"
            )
        if worker.disaggregation_mode in checked:
            raise ConfigError(
                f"{path} has several groups of {worker.disaggregation_mode} workers, and one is"
                " compared; leave one in a copy of the file"
            )
        names = (flags.pop("model_path", None), flags.get("served_model_name"))
        model_name = model_name or next(filter(_is_readable, names), None)
        engine_file = flags.pop("extra_engine_args", None)
        checked[worker.disaggregation_mode] = CheckedWorker(
            role=worker.disaggregation_mode,
            file=None if engine_file is None else Path(engine_file),
            words=to_argv(WorkerConfig, flags),
            where=path,
        )
    return list(checked.values()), model_name


def _is_readable(model: str | None) -> bool:
    """Return whether `_model` can read a model: its shape is known, or its folder exists."""
    if model is None:
        return False
    return model.removeprefix("openai/") in SHAPES or os.path.isdir(os.path.expanduser(model))


def _add_role(report: Report, facts: RoleFacts) -> None:
    report.roles.append(facts)
    for finding in check_role(facts):
        report.findings.append((str(facts.role), finding))
    memory = memory_table(facts)
    if memory is not None:
        report.memory.append((facts, memory))


def _add_pair(report: Report, prefill: RoleFacts, decode: RoleFacts) -> None:
    for finding in check_pair(prefill, decode):
        report.findings.append(("pair", finding))
    prompt_tokens = prefill.longest_prompt
    report.kv_transfer_tokens = prompt_tokens
    if prompt_tokens is not None:
        report.kv_transfer_s = transfer_s(prefill, decode, prompt_tokens)


def _rejected(path: Path, error: ConfigError) -> Finding:
    return Finding(
        severity="error",
        rule="argument-refused",
        field=error.field or "",
        value=str(path),
        why=error.message,
        fix="change the argument in the message",
    )


def _check_engine_of(path: Path) -> None:
    """Raise ConfigError if the file seems to be for another engine.

    It seems so if TensorRT-LLM does not know at least half of its arguments, and the other engine
    knows one of these unknown arguments.
    """
    try:
        given = read_yaml(find_file(path))
    except ConfigError:
        return  # an unreadable file is a finding already
    translated = trtllm_manifests.LIBRARY.moved.keys()
    unknown = [
        key
        for key in given
        if key not in translated and not schema.is_known(trtllm_manifests.LIBRARY, key)
    ]
    if 2 * len(unknown) < len(given):
        return
    known_by = {
        "vllm": [key for key in unknown if schema.is_known(vllm_manifests.LIBRARY, key)],
        "torch": [key for key in unknown if key in TorchArgs.model_fields],
    }
    for engine, known in known_by.items():
        if known:
            raise ConfigError(
                f"preflight checks TensorRT-LLM files only, but {path} is a file for --engine"
                f" {engine} (it has {known[0]}); to check it: {COMMAND_NAME} worker --engine"
                f" {engine} --model-path MODEL --extra-engine-args {path} --print-config"
            )


def _worker(checked: CheckedWorker, model_name: str | None) -> WorkerConfig:
    """Return the settings that the worker would load from this command line.

    The environment of this process is not read.

    Raises:
        ConfigError: the file does not exist, a flag is wrong, or a flag changes a setting that this
            command sets itself.
    """
    role, file, words, _ = checked
    # The settings that this command sets itself, by field: the value, and what the user has to do
    # instead of passing another value.
    fixed = {
        "model_path": (model_name or "model", "pass --model-path to this command"),
        "engine": ("trtllm", "only TensorRT-LLM is checked"),
        "disaggregation_mode": (str(role), "--prefill, --decode and --agg set the role"),
    }
    if file is not None:
        if not os.path.isfile(find_file(file)):
            raise ConfigError(f"file {file} does not exist")
        instead = "pass the file with --prefill, --decode or --agg"
        fixed["extra_engine_args"] = (str(file), instead)
    environ = {f"{ENV_PREFIX}{name.upper()}": value for name, (value, _) in fixed.items()}
    try:
        if "--print-config" in words:
            raise ConfigError("--print-config can't be used here: remove it")
        worker = load(WorkerConfig, prog=f"{COMMAND_NAME} worker", argv=words, environ=environ)
        for name, (value, instead) in fixed.items():
            given = getattr(worker, name)
            if str(given) != value:
                flag = worker.source_of(name).removeprefix("flag ")
                raise ConfigError(f"{flag} {given} can't be used here: {instead}")
        return worker
    except ConfigError as exc:
        raise ConfigError(
            f"the flags of the {role} worker: {exc.message}", field=exc.field
        ) from exc


def _model(name: str | None) -> Checkpoint | None:
    if name is None:
        return None
    plain = name.removeprefix("openai/")
    if plain in SHAPES and not os.path.isdir(name):
        return SHAPES[plain]
    return read_checkpoint(Path(os.path.expanduser(name)))


def _gpu(name: str | None) -> Gpu | None:
    """Return the GPU of this name; without a name, the first GPU of this machine or None."""
    if name is not None:
        return known_gpu(name.lower())
    here = visible_gpus()
    return here[0] if here else None
