"""Record what preflight finds in the shipped engine_configs/.

`python -m tests.unit.engines.trtllm.preflight_recording` writes tests/data/preflight_shipped.json.
Its diff shows what a change of the rules does to files that are known to be right.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dynamo_trtllm.cli.preflight import Report, evaluate
from dynamo_trtllm.config.commands import PreflightConfig
from tests.unit.engines.trtllm.shipped_pairs import FOLDER, LLAMA, LOADS, SHIPPED, config

RECORDING = Path(__file__).resolve().parents[3] / "data" / "preflight_shipped.json"
RELEASES = ("1.1.0", "1.2.1", "1.3.0rc29", "1.4.0rc1")
# for the stand-in; the model's files are made at first use, so it is checked without
DEMO = "tiny-gpt-oss/trtllm"

Findings = list[dict[str, Any]]


def found(report: Report) -> Findings:
    """Return the findings of a report with their roles and full texts, as JSON values."""
    return [{"role": role, **asdict(finding)} for role, finding in report.findings]


def shipped_findings(scratch: Path) -> dict[str, Findings]:
    """Return the findings by "FOLDER GPU RELEASE", and "… with its load" for folders with a known
    load.

    Args:
        scratch: an empty folder, where the config.json of a model without a bundled shape is
            written.
    """
    (scratch / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    recorded: dict[str, Findings] = {}
    for name in sorted(SHIPPED):
        gpu = SHIPPED[name][0][0]
        model = str(scratch) if name.startswith("llama") else name.partition("/")[0]
        for release in RELEASES:
            plain = config(name, gpu, release, model)
            recorded[f"{name} {gpu} {release}"] = _portable(found(evaluate(plain)))
            if name in LOADS:
                isl, osl, concurrency = LOADS[name]
                loaded = plain.model_copy(
                    update={"isl": isl, "osl": osl, "concurrency": concurrency}
                )
                recorded[f"{name} {gpu} {release} with its load"] = _portable(
                    found(evaluate(loaded))
                )
    for release in RELEASES:
        demo = PreflightConfig(
            prefill=FOLDER / DEMO / "prefill.yaml",
            decode=FOLDER / DEMO / "decode.yaml",
            gpu="h200",
            release=release,
        )
        recorded[f"{DEMO} h200 {release}"] = _portable(found(evaluate(demo)))
    return recorded


def _portable(findings: Findings) -> Findings:
    """Return the findings with paths relative to the repository."""
    here = f"{FOLDER.parent}/"
    return [
        {
            key: value.replace(here, "") if isinstance(value, str) else value
            for key, value in finding.items()
        }
        for finding in findings
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        recorded = shipped_findings(Path(scratch))
    RECORDING.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    print(f"{RECORDING}: {len(recorded)} cases, {sum(map(len, recorded.values()))} findings")


if __name__ == "__main__":
    main()
