"""Write docs/reference-metrics.md from the table of metrics.

`python -m scripts.metrics_reference` runs it. A test compares the page with this output.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from dynamo_trtllm.observability.metrics import PREFIX, TABLE, Metric, Process
from scripts.config_reference import table

PAGE = Path(__file__).parents[1] / "docs" / "reference-metrics.md"
_HEAD = """\
# Metrics

<!-- written by `python -m scripts.metrics_reference`; a test compares -->

This page lists every metric. Frontends serve `GET /metrics` on their HTTP port, workers on their
system port. Both also report the `process_*` metrics of the Prometheus client. The label `code` is
`ok`, `cancelled` or an [error code](api.md#errors), unless the table says otherwise.
[Monitoring](monitoring.md) has alerts, and says which metrics to look at first.
"""


def page() -> str:
    """Return the page."""
    parts = [_HEAD]
    for process in get_args(Process):
        rows = [row(metric) for metric in TABLE if metric.process == process]
        head = (f"{process} metric", "type", "labels", "meaning")
        parts.append(f"## Metrics of a {process}\n\n{table(head, rows)}")
    return "\n".join(parts)


def row(metric: Metric) -> tuple[str, str, str, str]:
    """Return the row of a metric: name, type, labels, meaning."""
    labels = ", ".join(f"`{name}`" for name in metric.labels)
    meaning = metric.meaning or metric.help
    return f"`{PREFIX}{metric.name}`", metric.kind, labels, meaning[0].upper() + meaning[1:]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
