"""`dynamo-trtllm version`: what it finds on a machine, and that nothing it looks for can stop it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from dynamo_trtllm import __version__
from dynamo_trtllm.cli import version
from dynamo_trtllm.cli.version import main, versions
from dynamo_trtllm.errors import ConfigError

SMI = "#!/bin/sh\necho '0, NVIDIA H200, 143771 MiB, 570.1'\necho '1, NVIDIA H200, 143771 MiB, 570.1'\n"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which programs are found."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit):
        main(argv)
    return capsys.readouterr().out


def test_version_when_typed_then_package_engines_libraries_servers_and_gpus(
    programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(programs / "nvidia-smi", SMI)
    rows = dict(line.split("  ", 1) for line in shown(capsys).splitlines())
    assert rows["dynamo_trtllm"].strip() == __version__
    assert rows["Python"].strip().startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert rows["engine mock"].strip() == "built in"
    assert rows["etcd"].split()[1:2] == ["at"]
    assert rows["NATS"].split()[1:2] == ["at"]
    assert rows["GPU 1"].strip() == "NVIDIA H200, 143771 MiB, driver 570.1"
    assert {"engine torch", "engine vllm", "engine trtllm", "NIXL", "UCX", "GPU 0"} <= rows.keys()


def test_version_when_nothing_is_installed_then_it_says_so_and_json_has_null(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> str:
        raise ConfigError("missing")

    monkeypatch.setattr(version, "_package", lambda name: None)
    monkeypatch.setattr(version, "etcd_binary", missing)
    monkeypatch.setattr(version, "nats_binary", missing)
    monkeypatch.setattr(version.importlib.util, "find_spec", lambda name: None)
    write(programs / "nvidia-smi", "#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    found = json.loads(shown(capsys, "--json"))
    assert found["engines"] == {"trtllm": None, "vllm": None, "torch": None, "mock": __version__}
    assert [found[name] for name in ("nixl", "ucx", "etcd", "nats_server", "gpus")] == [None, None, None, None, []]
    said = shown(capsys)
    assert said.count("not installed") == 7
    assert said.endswith("none (nvidia-smi lists none)\n")


def test_version_when_a_part_of_an_engine_is_missing_then_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch": "2.13.0", "safetensors": "0.8"}
    monkeypatch.setattr(version, "_package", there.get)
    assert versions()["engines"]["torch"] == "2.13.0 (without transformers, llguidance)"


def test_version_when_the_driver_hangs_then_it_does_not_wait(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "_PROGRAM_TIMEOUT_S", 0.2)
    write(programs / "nvidia-smi", "#!/bin/sh\nexec sleep 60\n")
    begun = time.monotonic()
    assert versions()["gpus"] == []
    assert time.monotonic() - begun < 5
