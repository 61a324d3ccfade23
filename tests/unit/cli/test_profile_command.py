"""What a worker has learned becomes constants of simulations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_trtllm.cli import profile
from dynamo_trtllm.cli.profile_loads import Alone
from dynamo_trtllm.config.commands import ProfileConfig
from dynamo_trtllm.observability.metrics import FrontendMetrics, WorkerMetrics
from dynamo_trtllm.protocol.cost_model import CostModel, Fit
from dynamo_trtllm.simulate.constants import find_constants, known_constants

DECODE = (0.005, 0.0005, 0.0001, 0.0, 0.00001, 0.0)
PREFILL = (0.05, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 2e-5, 0.0, 0.0, 0.001)


def page(num_samples: int) -> str:
    metrics = WorkerMetrics()
    fits = [Fit(values, 0.9, 1.1, num_samples) for values in (DECODE, PREFILL)]
    metrics.set_cost(CostModel(*fits, step_tokens=8192))
    return metrics.render({"kv_blocks_total": 77}).decode()


def config(out: Path) -> Any:
    return ProfileConfig(
        model="org/Some-Model", url="http://localhost:1", gpu="H200", engine_version="9", out=out
    )


def test_learned_coefficients_become_constants(tmp_path: Path) -> None:
    file = tmp_path / "constants.yaml"
    entry = profile.constants_of(page(500), config(file))
    file.write_text(yaml.safe_dump({"constants": [entry]}), encoding="utf-8")
    found = find_constants(known_constants(file), "some-model", "vllm", "h200", "9")
    assert found.mock["step_costs"] == {"decode": list(DECODE), "prefill": list(PREFILL)}
    # Blocks of 128 as those of workers that transfer KV, and a pool of 77 times 16 tokens.
    assert (found.mock["kv_block_size"], found.mock["kv_cache_blocks"]) == (128, 9)
    assert found.fitted == "500 samples of decode_step, 500 samples of prefill_step"


def test_what_no_worker_learns_is_that_of_the_package(tmp_path: Path) -> None:
    other = profile.constants_of(page(500), config(tmp_path / "x"))["mock"]
    assert other["plan_ahead"] is True
    # KV transfers depend on the model.
    assert "kv_transfer_s" not in other
    known = config(tmp_path / "x").model_copy(update={"model": "openai/gpt-oss-120b"})
    assert profile.constants_of(page(500), known)["mock"]["kv_transfer_s"] > 0


def test_time_besides_the_step_is_that_of_the_frontend(tmp_path: Path) -> None:
    step_s = PREFILL[0] + 2048 * 1e-5 + PREFILL[-1] * 2
    alone = Alone(prompt_tokens=2048, seconds=step_s + 0.0075)
    assert profile.constants_of(page(500), config(tmp_path / "x"), alone)["frontend_ms"] == 7.5


def test_worker_that_learned_too_little_is_named(tmp_path: Path) -> None:
    with pytest.raises(profile.NotProfiled, match="learned from 99 samples of decode_step"):
        profile.constants_of(page(99), config(tmp_path / "x"))
    with pytest.raises(profile.NotProfiled, match="learned from 0 samples"):
        profile.constants_of("", config(tmp_path / "x"))


def test_address_of_a_frontend_is_named() -> None:
    profile.check_page(page(0), "http://worker")
    with pytest.raises(profile.NotProfiled, match="http://frontend is not a worker"):
        profile.check_page(FrontendMetrics().render().decode(), "http://frontend")


def test_worker_that_does_not_answer_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["m", "--url", "http://127.0.0.1:1", "--gpu", "h200", "--out", str(tmp_path / "x")]
    with pytest.raises(SystemExit) as ended:
        profile.main(words)
    assert ended.value.code == 1
    assert "does not answer" in capsys.readouterr().err


def test_profile_checks_its_file_before_the_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "none" / "x.yaml"
    words = ["m", "--url", "http://127.0.0.1:1", "--gpu", "h200", "--out", str(out)]
    with pytest.raises(SystemExit) as ended:
        profile.main(words)
    assert ended.value.code == 2
    assert f"{out} can't be written" in capsys.readouterr().err
