"""`launch FILE --dry-run`: it checks the file, says what would start, and starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_trtllm.launch import main as launch

FILE = """
services: {etcd: start, nats: "nats://user:secret@host:4222"}
frontend: {http-port: 8123, api-key: hidden-key-of-clients}
workers:
- name: w
  disaggregation_mode: prefill_and_decode
  devices: cpu
  env: {HF_TOKEN: hidden-token}
  flags: {engine: mock, model-path: tiny-gpt-oss}
"""


def dry_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    def start(*_: object, **__: object) -> None:
        pytest.fail("something was started")

    monkeypatch.setattr(launch, "Launcher", start)
    with pytest.raises(SystemExit) as ended:
        launch.main([str(path), "--dry-run"])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_dry_run_prints_what_would_start_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d.yaml"
    path.write_text(FILE)
    assert dry_run(path, monkeypatch) == 0
    said = capsys.readouterr().out
    assert "etcd would be started\n" in said
    assert "address: 127.0.0.1, port 8123 (--http-port)\n" in said
    assert "--engine=mock --model-path=tiny-gpt-oss" in said
    assert "GPUs: none (CUDA_VISIBLE_DEVICES)\n" in said
    assert "HF_TOKEN" in said
    for secret in ("hidden", "secret"):
        assert secret not in said


def test_dry_run_of_a_wrong_file_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d.yaml"
    path.write_text(FILE.replace("engine: mock", "engine: mock, no-such-flag: 1"))
    assert dry_run(path, monkeypatch) == 2
    assert "no-such-flag" in capsys.readouterr().err.replace("_", "-")
