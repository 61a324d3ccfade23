"""The command `serve` without starting a deployment: flags, files, models of a hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_trtllm.config.deployment import load_deployment
from dynamo_trtllm.launch import serve
from dynamo_trtllm.launch.topology import MachineFacts
from dynamo_trtllm.models.hub import Hub
from dynamo_trtllm.protocol.messages import Role
from tests.kit.hub_server import COMMIT, NAME, HubServer

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "quantization_config": {"quant_method": "mxfp4"},
}
NO_GPU = MachineFacts(
    gpus=(),
    no_gpu_reason="none",
    cpus=1,
    memory_bytes=16 << 30,
    engines=frozenset({"torch", "mock"}),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "my${model}"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    (made / "tokenizer.json").write_text("{}")
    (made / "model.safetensors").write_bytes(bytes(1000))
    return made


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "machine_facts", lambda _: NO_GPU)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": b"{ }",
        "tokenizer_config.json": b"{}",
        "model.safetensors": bytes(1000),
    }
    running = HubServer(files)
    monkeypatch.setattr(
        serve, "Hub", lambda: Hub(endpoint=running.url, cache_dir=tmp_path / "cache")
    )
    yield running
    running.close()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which the command ends."""
    with pytest.raises(SystemExit) as ended:
        serve.main(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_dry_run_prints_a_file_for_the_launcher(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "--max-seq-len",
        "64",
        "--stall-timeout-s=9",
        str(folder),
        "--dry-run",
        "--port",
        "8123",
    ]
    assert serve.main(argv) == 0
    text = capsys.readouterr().out
    assert "# engine:    torch: no NVIDIA GPU was found (none), and it runs on CPUs\n" in text
    file = tmp_path / "d.yaml"
    file.write_text(text)
    deployment = load_deployment(file, {})
    assert deployment.frontend == {"http_port": 8123, "stall_timeout_s": 9.0}
    assert [worker.name for worker in deployment.workers] == ["prefill", "decode"]
    for worker in deployment.workers:
        assert worker.flags["model_path"] == str(folder.resolve())
        assert (worker.flags["served_model_name"], worker.flags["max_seq_len"]) == (
            "my${model}",
            64,
        )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "MODEL is missing"),
        (("none",), "model folder none does not exist"),
        (("~no-such-user/m",), "model folder ~no-such-user/m does not exist"),
        ((300 * "a",), "does not exist; pass a folder or a bundled model name"),
        (("gpt-oss-120b",), "for a model on the Hugging Face Hub, give ORG/NAME"),
        (
            ("tiny-gpt-oss", "--revision", "x"),
            "--revision needs a model on the Hub, not tiny-gpt-oss",
        ),
        (("tiny-gpt-oss", "--max-batch-sise", "3"), "did you mean --max-batch-size?"),
        (("tiny-gpt-oss", "--max-batch-size", "x"), "--max-batch-size"),
        (("tiny-gpt-oss", "--stall-timout-s", "3"), "did you mean --stall-timeout-s?"),
        (("tiny-gpt-oss", "--is-prefill-worker"), "use --prefill and --decode"),
        (("tiny-gpt-oss", "--nats-server", "nats://x"), "this command starts its own servers"),
        (("tiny-gpt-oss", "--model-path", "y"), "--model-path can't be used here: the model is"),
        (("--model", "tiny-gpt-oss"), "MODEL is missing"),
        (("tiny-gpt-oss", "--", "--max-batch-size", "3"), "remove --: flags of workers"),
        (("tiny-gpt-oss", "--replicas", "2", "--decode", "1"), "--replicas asks for aggregated"),
        (("tiny-gpt-oss", "--elastic", "2", "--replicas", "1"), "--elastic asks for elastic"),
        (
            ("tiny-gpt-oss", "--elastic", "2", "--engine", "trtllm", "--dry-run"),
            "--elastic: the trtllm engine can't run an elastic worker: kv_cache_config: ",
        ),
    ],
)
def test_serve_when_a_setting_is_wrong_then_one_line_says_so(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    assert says in refused(capsys, *words)


@pytest.mark.parametrize(
    ("flag", "role"), [("--replicas", Role.AGGREGATED), ("--elastic", Role.ELASTIC)]
)
def test_dry_run_with_a_number_of_one_kind_has_such_workers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, role: Role
) -> None:
    assert serve.main([str(folder), "--dry-run", flag, "2"]) == 0
    file = tmp_path / "d.yaml"
    file.write_text(capsys.readouterr().out)
    (worker,) = load_deployment(file, {}).workers
    assert (worker.disaggregation_mode, worker.count) == (role, 2)


def test_elastic_workers_of_serve_take_shares(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(folder), "--dry-run", "--elastic", "2", "--prefill-share", "0.5"]
    assert serve.main(words) == 0
    file = tmp_path / "d.yaml"
    file.write_text(capsys.readouterr().out)
    (worker,) = load_deployment(file, {}).workers
    assert worker.flags["prefill_share"] == 0.5


def test_dry_run_of_hub_model_downloads_only_its_config(
    hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main([NAME, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert f"# First download 1 GiB: hf download {NAME} --revision {COMMIT}\n" in text
    assert f"served-model-name: {NAME}\n" in text
    assert f"snapshots/{COMMIT}\n" in text
    assert not [line for line in hub.requests if "safetensors" in line]


def test_serve_downloads_a_hub_model_before_launching(
    hub: HubServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    async def run(deployment, *, log_format, preface):
        started.append(deployment.workers[0].flags["model_path"])

    monkeypatch.setattr(serve, "run", run)
    assert serve.main([NAME]) == 0
    lines = capsys.readouterr().out.splitlines()
    steps = list(dict.fromkeys(line.split()[0] for line in lines))
    assert steps == ["model:", "engine:", "topology:", "devices:", "downloading", "downloaded"]
    assert (Path(started[0]) / "model.safetensors").read_bytes() == bytes(1000)


def test_dry_run_of_mock_does_not_ask_the_hub(
    hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main([NAME, "--dry-run", "--engine", "mock"]) == 0
    assert f"model-path: {NAME}\n" in capsys.readouterr().out
    assert hub.requests == []


def test_serve_when_the_hub_can_not_be_reached_then_one_line(tmp_path: Path) -> None:
    """With the real variables, which huggingface_hub reads when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "dynamo_trtllm.launch.serve", NAME],
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "http://127.0.0.1:9 can't be reached" in done.stderr
    assert done.stderr.count("\n") == 1


def test_serve_when_interrupted_during_a_download_then_130(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Hub, "download", interrupted)
    with pytest.raises(SystemExit) as ended:
        serve.main([NAME])
    assert ended.value.code == 130


def test_model_facts_count_quantized_weights_unpacked(folder: Path) -> None:
    _, facts = serve._model(serve.load(serve.ServeConfig, prog="", argv=[str(folder)]))
    assert facts.weight_bytes == 1000
    assert facts.torch_values is not None
    # of two layers, and of the vocabulary
    matrices = 2 * (3 * 64 * 128 + 2 * 64 * 2 * 64) + 2 * 100 * 64
    assert matrices <= facts.torch_values < 1.1 * matrices
    assert facts.num_heads == 4
