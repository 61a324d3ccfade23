"""`dynamo-trtllm version`: what it finds on a machine, and that nothing it looks for can stop
it.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm import __version__
from dynamo_trtllm.cli import version
from dynamo_trtllm.cli.version import main, versions
from dynamo_trtllm.protocol.errors import ConfigError
from tests.kit.package_index import RELEASES, write_image

SMI = (
    "#!/bin/sh\necho '0, NVIDIA H200, 143771 MiB, 570.1'\necho '1, NVIDIA H200, 143771 MiB,"
    " 570.1'\n"
)


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


def test_version_shows_package_engines_libraries_and_gpus(
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
    assert rows["pydantic"].strip() == importlib.metadata.version("pydantic")
    assert {"engine torch", "engine vllm", "engine trtllm", "NIXL", "UCX", "GPU 0"} <= rows.keys()


def test_version_when_nothing_is_installed_then_null(
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
    assert set(found["packages"].values()) == {None}
    assert found["broken_pins"] == []
    assert [found[name] for name in ("nixl", "ucx", "etcd", "nats_server", "gpus")] == [
        None,
        None,
        None,
        None,
        [],
    ]
    said = shown(capsys)
    assert said.count("not installed") == 7
    assert said.endswith("none (nvidia-smi lists none)\n")


@pytest.mark.parametrize(
    "release", RELEASES, ids=lambda release: f"{release['name']}-{release['version']}"
)
def test_version_of_released_image_has_no_broken_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: dict[str, Any]
) -> None:
    write_image(tmp_path, release)
    monkeypatch.syspath_prepend(tmp_path)
    found = versions()
    assert found["packages"]["pydantic"] == release["image"]["pydantic"]
    # transformers is no package of the recorded images, so that of this environment is found
    assert [pin for pin in found["broken_pins"] if pin["package"] in release["image"]] == []


def test_version_shows_pin_that_a_library_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (release,) = [found for found in RELEASES if found["version"] == "1.2.1"]
    image = {
        **release["image"],
        "openai-harmony": "0.0.8",
        "numpy": "2.4.6",
        "transformers": "4.57.3",
    }
    write_image(tmp_path, {**release, "image": image})
    monkeypatch.syspath_prepend(tmp_path)
    pins = json.loads(shown(capsys, "--json"))["broken_pins"]
    engine = {"engine": "tensorrt-llm 1.2.1"}
    assert [pin for pin in pins if pin["package"] in image] == [
        {"package": "numpy", "version": "2.4.6", **engine, "requires": "<2"},
        {"package": "openai-harmony", "version": "0.0.8", **engine, "requires": "==0.0.4"},
    ]
    rows = dict(line.split(None, 1) for line in shown(capsys).splitlines())
    assert rows["openai-harmony"] == "0.0.8 (but tensorrt-llm 1.2.1 requires ==0.0.4)"
    assert rows["transformers"] == "4.57.3"


def test_version_compares_both_harmony_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM 0.31 requires the fork, this package the original."""
    image = {"openai-harmony": "0.0.8", "oss-harmony": "0.0.9"}
    requires = ["oss-harmony>=0.0.11"]
    write_image(
        tmp_path, {"name": "vllm", "version": "0.31.0", "image": image, "requires_dist": requires}
    )
    monkeypatch.syspath_prepend(tmp_path)
    rows = dict(line.split(None, 1) for line in shown(capsys).splitlines())
    assert rows["openai-harmony"] == "0.0.8"
    assert rows["oss-harmony"] == "0.0.9 (but vllm 0.31.0 requires >=0.0.11)"


def test_version_skips_pins_of_extras_and_unreadable_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requires = [
        "numpy<1; extra == 'devel'",
        "numpy<1; python_version < '3'",
        "tokenizers @@ 1",
        "pydantic<1",
    ]
    image = {"numpy": "2.4.6", "tokenizers": "0.22", "pydantic": "unknown"}
    write_image(
        tmp_path, {"name": "vllm", "version": "0.24.0", "image": image, "requires_dist": requires}
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert versions()["broken_pins"] == []


def test_version_names_a_missing_engine_part(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch": "2.13.0", "safetensors": "0.8"}
    monkeypatch.setattr(version, "_package", there.get)
    assert versions()["engines"]["torch"] == "2.13.0 (without transformers, llguidance)"


def test_version_when_the_driver_hangs_then_it_does_not_wait(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "_PROGRAM_TIMEOUT_S", 0.2)
    write(programs / "nvidia-smi", "#!/bin/sh\nexec sleep 60\n")
    begun = time.monotonic()
    assert versions()["gpus"] == []
    assert time.monotonic() - begun < 5
