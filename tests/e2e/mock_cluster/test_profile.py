"""`python -m benchmarks.profile` against a running deployment: its figures are those of its own raw
records.
"""

from __future__ import annotations

import gzip
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from tests.kit.cluster import Cluster, run_in_one

ROOT = Path(__file__).parents[3]
SHAPE = "{name: small, isl: 20, osl: 12, concurrency: [2, 4], requests: 16, warmup: 2, gpus: 2}"
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def profile(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "benchmarks.profile", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)


@pytest.fixture
def shape(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(SHAPE)
    return str(path)


@pytest.mark.timeout(180)
def test_profile_figures_equal_its_records(
    mock_cluster: Cluster, shape: str, tmp_path: Path
) -> None:
    url = mock_cluster.frontend.url()
    out = tmp_path / "out"
    done = profile(
        "--shape",
        shape,
        "--url",
        url,
        "--model",
        "mock",
        "--out",
        str(out),
        "--fail-over",
        "ttft_p50_ms=0.001",
        "--goodput",
        "ttft:60000",
        "gap:0.0001",
    )
    assert done.returncode == 1, done.stderr
    assert "limit missed: ttft_p50_ms at concurrency 2" in done.stderr
    run = orjson.loads((out / "run.json").read_bytes())
    lines = [
        orjson.loads(line)
        for line in gzip.decompress((out / "records.jsonl.gz").read_bytes()).splitlines()
    ]
    assert [point["level"]["concurrency"] for point in run["points"]] == [2, 4]
    for point in run["points"]:
        records = [line["record"] for line in lines if line["level"] == point["level"]]
        figures = point["figures"]
        assert [(r["status"], r["error"], r["output_tokens"]) for r in records] == [
            (200, "", 12)
        ] * 16
        assert figures["ok"] == 16
        assert figures["tokens_per_s"] == pytest.approx(16 * 12 / figures["wall_s"])
        span_s = max(r["end_s"] for r in records) - min(r["planned_s"] for r in records)
        assert figures["wall_s"] == pytest.approx(span_s, abs=0.5)
        ttft_ms = sorted((r["first_s"] - r["planned_s"]) * 1e3 for r in records)
        assert figures["ttft_ms"]["p50"] == pytest.approx(ttft_ms[8])
        assert figures["ttft_ms"]["max"] == pytest.approx(ttft_ms[-1])
        gaps_ms = sorted(gap * 1e3 for r in records for gap in r["gaps_s"])
        assert figures["itl_ms"]["max"] == pytest.approx(gaps_ms[-1])
        tpot_ms = [(r["last_s"] - r["first_s"]) * 1e3 / 11 for r in records]
        assert figures["tpot_ms"]["p50"] == pytest.approx(statistics.median_high(tpot_ms))
        assert "queue" in point["phase_s"]
        assert point["good"] == 0  # no gap is that short
    page = (out / "report.html").read_text()
    assert "http://" not in page.replace(url, "").replace("http://www.w3.org", "")
    assert page.count('<img alt="') == 4


def test_profile_with_bad_arguments_exits_with_2(subtests: pytest.Subtests) -> None:
    wrong = {
        ("--shape", "prompts-9k"): "Did you mean prompts-8k?",
        ("--goodput", "ttfs:9"): "no goal 'ttfs'. Did you mean ttft?",
        ("--request-rate", "0"): "every request_rate must be above 0",
        ("--request-rate", "1", "--concurrency", "1"): "not allowed with argument",
        ("--shape", "prompts-32k", "--fail-under", "speed=1"): "no metric 'speed'",
        ("--shape", "prompts-32k", "--concurrency", "none"): "expected numbers",
        ("--shape", "prompts-32k", "--compare", "/nowhere"): "/nowhere has no run",
    }
    lines = [["benchmarks.profile", *words] for words in wrong]
    for (words, message), done in zip(wrong.items(), run_in_one(lines), strict=True):
        with subtests.test(words):
            assert done.status == 2
            assert message in done.stderr.splitlines()[-1]


def test_profile_of_unsuitable_model_measures_nothing(
    mock_cluster: Cluster, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    long = tmp_path / "long.yaml"
    long.write_text("{name: long, isl: 131000, osl: 100, concurrency: [1], requests: 1}")
    edge = tmp_path / "edge.yaml"
    edge.write_text("{name: edge, isl: 131000, osl: 72, concurrency: [2], requests: 9}")
    too_long = "shape long has 131000 + 100 tokens, model mock takes 131072 at most"
    cases = [
        ("prompts-32k", "nope", 1, "Model 'nope' not found at"),
        (str(long), "mock", 2, too_long),
        (str(edge), "mock", 1, "no more were sent (context_length_exceeded"),
    ]
    out = tmp_path / "out"
    target = ["--url", mock_cluster.frontend.url(), "--out", str(out)]
    lines = [
        ["benchmarks.profile", "--shape", shape, "--model", model, *target]
        for shape, model, _, _ in cases
    ]
    for (_, _, status, reason), done in zip(cases, run_in_one(lines), strict=True):
        with subtests.test(reason):
            assert done.status == status, done.stderr
            assert reason in done.stderr.splitlines()[-1]
            assert not out.exists()


@pytest.mark.extra
@pytest.mark.timeout(240)
def test_report_loads_in_a_browser_without_outside_requests(
    mock_cluster: Cluster, shape: str, tmp_path: Path
) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert browser, "no browser here; install chromium (Debian: chromium-headless-shell)"
    out = tmp_path / "out"
    url = mock_cluster.frontend.url()
    done = profile("--shape", shape, "--url", url, "--model", "mock", "--out", str(out))
    assert done.returncode == 0, done.stderr
    argv = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'browser'}",
    ]
    argv += [
        "--enable-logging=stderr",
        f"--log-net-log={tmp_path / 'net.json'}",
        f"--screenshot={tmp_path / 'r.png'}",
    ]
    shown = subprocess.run(
        [*argv, f"file://{out / 'report.html'}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "COMMAND_NAME" not in shown.stderr
    asked = (tmp_path / "net.json").read_text().replace("\\/", "/")
    assert "URL_REQUEST_START_JOB" in asked
    assert '"url":"http' not in asked
    assert (tmp_path / "r.png").stat().st_size > 10_000
