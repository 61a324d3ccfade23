"""What `dynamo-trtllm status` knows of deployments, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from dynamo_trtllm.cli.status_keys import KEY_HEAD, KeyStatus, key_rows, key_table
from dynamo_trtllm.config.text_table import format_table
from dynamo_trtllm.launch.process_specs import FRONTEND, PLANNER
from dynamo_trtllm.protocol.counted import counted
from dynamo_trtllm.protocol.sanitize import escape_controls

if TYPE_CHECKING:
    from rich.console import Group

READY: Final = "ready"
REGISTERED: Final = "registered"
UNREACHABLE: Final = "unreachable"
_HEAD: Final = ("process", "role", "state", "address", "load")
_BAR_CHARS: Final = 10
_MAX_STATE_CHARS: Final = 60  # longest cell; a longer reason is a line below the table
_COLORS: Final = {READY: "green", REGISTERED: "green", UNREACHABLE: "red"}


class FrontendRates(msgspec.Struct, kw_only=True):
    """What a frontend did in the last seconds."""

    tokens_per_s: float
    requests_per_s: float  # requests that ended
    # Percentiles of the last minute. None: no request had its first token in that minute.
    ttft_p50_s: float | None
    ttft_p99_s: float | None


class ProcessStatus(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One process of a deployment, or an instance of which only the registration is known."""

    name: str
    role: str
    # "ready", "registered", "starting", "unreachable", or the phase of a process that is not ready.
    state: str = ""
    reason: str = ""
    address: str = ""
    instance_id: str = ""
    model: str = ""
    engine: str = ""
    # The shares of an elastic worker. None: it is no elastic worker.
    prefill_share: float | None = None
    decode_share: float | None = None
    # When these shares changed last. None: not since the worker registered.
    shares_since: str | None = None
    # Metrics by name, summed over labels.
    load: dict[str, float] = msgspec.field(default_factory=dict)
    # The next three are set only for frontends.
    # The histogram of the time to first token, as `status_rates.ttft_buckets` returns it.
    ttft_buckets: dict[float, float] = msgspec.field(default_factory=dict)
    rates: FrontendRates | None = None  # only with --watch
    # The API keys in use, those with the most tokens first.
    keys: list[KeyStatus] = msgspec.field(default_factory=list)


class DeploymentReport(msgspec.Struct, kw_only=True):
    """The processes of one deployment."""

    namespace: str
    name: str = ""  # the name of a deployment that was launched on this machine
    url: str = ""  # the URL of its first frontend
    processes: list[ProcessStatus]
    # Why a model can't be served, as the frontend's `/health` and `/v1/models/NAME/ready` say; or
    # why a worker is not known.
    not_ready: list[str] = msgspec.field(default_factory=list)
    unknown: str = ""  # why it is not known whether the models can be served; "": it is known
    # What needs attention while the models are served, such as a pair whose KV transfers fail.
    problems: list[str] = msgspec.field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return self._lacks_nothing and not self.unknown

    @property
    def _lacks_nothing(self) -> bool:
        """True if all processes are ready, and no model is known to be unavailable."""
        are_ready = all(process.state in (READY, REGISTERED) for process in self.processes)
        return are_ready and not self.not_ready

    @property
    def state(self) -> str:
        """Whether the deployment is ready, in words."""
        if not self._lacks_nothing:
            return "NOT READY"
        return "its state is not known" if self.unknown else "ready"


def as_text(reports: Iterable[DeploymentReport]) -> str:
    """Return the reports as plain lines."""
    return "\n".join(
        _title(report)
        + format_table([_HEAD, *_rows(report)])
        + "".join(key_table(process.keys) for process in report.processes)
        + _problems(report)
        for report in reports
    )


def _title(report: DeploymentReport) -> str:
    name = report.name or report.namespace or "-"
    title = f"deployment {name}: {report.state}"
    if report.url:
        title += f", {report.url}"
    lines = [title]
    models: dict[tuple[str, str], list[str]] = {}
    for process in report.processes:
        if process.model:
            models.setdefault((process.model, process.engine), []).append(process.role)
    for (model, engine), roles in sorted(models.items()):
        different_roles = dict.fromkeys(roles)  # in their order
        workers = ", ".join(f"{roles.count(role)} {role}" for role in different_roles)
        line = f"model {model}: {workers}"
        if engine:
            line += f" (engine {engine})"
        lines.append(line)
    return "".join(f"{escape_controls(line)}\n" for line in lines)


def _problems(report: DeploymentReport) -> str:
    lines = [f"not ready: {line}" for line in report.not_ready]
    if report.unknown:
        lines.append(f"not known: {report.unknown}")
    lines += [f"problem: {line}" for line in report.problems]
    # A reason that is too long for the table has a line of its own.
    lines += [
        f"{process.name}: {process.reason}"
        for process in report.processes
        if process.reason and _state(process) == process.state
    ]
    return "".join(f"{escape_controls(line)}\n" for line in lines)


def _rows(report: DeploymentReport, *, has_bars: bool = False) -> Iterator[tuple[str, ...]]:
    for process in report.processes:
        cells = (
            process.name,
            _role(process),
            _state(process),
            process.address or "-",
            _load(process, has_bars=has_bars),
        )
        yield tuple(map(escape_controls, cells))


def _role(process: ProcessStatus) -> str:
    """Return the role of a process, for an elastic worker with its shares of prefill and decode."""
    if process.prefill_share is None:
        return process.role
    role = f"{process.role} {process.prefill_share:g}/{process.decode_share:g}"
    if process.shares_since:
        # The part HH:MM:SS, which is enough for the eye. --json has the whole time.
        role += f" since {process.shares_since[11:19]}"
    return role


def _state(process: ProcessStatus) -> str:
    """Return the state of a process, with its reason if that is short."""
    if not process.reason:
        return process.state
    state = f"{process.state}: {process.reason}"
    return state if len(state) <= _MAX_STATE_CHARS else process.state


def _load(process: ProcessStatus, *, has_bars: bool) -> str:
    """Return the load in a few words."""
    load = process.load
    if not load:
        return "-"
    if process.role == PLANNER:
        return "leads" if load.get("planner_is_leader") else "does not lead"
    output_tokens = _counted(load.get("output_tokens_total", 0), "token")
    if process.role == FRONTEND:
        words = [
            f"{load.get('inflight', 0):.0f} in flight",
            f"{load.get('queued', 0):.0f} queued",
        ]
        if process.rates is not None:
            return ", ".join([*words, *_rates(process.rates)])
        words += [_counted(load.get("requests_total", 0), "request"), output_tokens]
        num_first_tokens = load.get("ttft_seconds_count")
        if num_first_tokens:
            mean_s = load["ttft_seconds_sum"] / num_first_tokens
            words.append(f"mean TTFT {mean_s * 1e3:.0f} ms")
        return ", ".join(words)
    words = [f"{load.get('running', 0):.0f} running", f"{load.get('waiting', 0):.0f} waiting"]
    num_blocks = load.get("kv_blocks_total")
    if num_blocks:
        part = load.get("kv_blocks_used", 0) / num_blocks
        bar = f"{_bar(part)} " if has_bars else ""
        words.append(f"KV {bar}{part:.0%}")
    words.append(output_tokens)
    return ", ".join(words)


def _counted(count: float, noun: str) -> str:
    return counted(count, noun, f"{count:,.0f}")


def _rates(rates: FrontendRates) -> list[str]:
    words = [f"{rates.requests_per_s:.1f} requests/s", f"{rates.tokens_per_s:,.0f} tokens/s"]
    if rates.ttft_p50_s is not None and rates.ttft_p99_s is not None:
        words.append(
            f"TTFT p50 {rates.ttft_p50_s * 1e3:,.0f}, p99 {rates.ttft_p99_s * 1e3:,.0f} ms"
        )
    return words


def _bar(part: float) -> str:
    num_full = round(min(max(part, 0.0), 1.0) * _BAR_CHARS)
    return "█" * num_full + "░" * (_BAR_CHARS - num_full)


def colored(reports: Iterable[DeploymentReport], clock: str = "") -> Group:
    """Return the reports for a terminal.

    Args:
        reports: the reports.
        clock: with --watch, the time to show beside the reports. The use of KV then has bars. "":
            the reports have no time and no bars.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    has_clock = bool(clock)
    shown: list[Text | Table] = []
    for report in reports:
        title = Text(_title(report).rstrip(), style="bold" if report.is_ready else "bold red")
        shown.append(Text.assemble((f"{clock} ", "dim"), title) if has_clock else title)
        table = Table(*_HEAD, box=None, pad_edge=False)
        for process, row in zip(report.processes, _rows(report, has_bars=has_clock), strict=True):
            name, role, state, *others = row
            color = _COLORS.get(process.state, "yellow")
            table.add_row(Text(name), Text(role), Text(state, style=color), *map(Text, others))
        shown.append(table)
        for process in report.processes:
            if process.keys:
                keys = Table(*KEY_HEAD, box=None, pad_edge=False)
                for key_row in key_rows(process.keys):
                    keys.add_row(*map(Text, key_row))
                shown.append(keys)
        shown.append(Text(_problems(report), style="red"))
    return Group(*shown)
