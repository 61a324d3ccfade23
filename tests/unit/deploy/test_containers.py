"""The Containerfiles as far as they can be judged without building them, the build context, and
container_run.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from dynamo_trtllm import __version__
from tests.kit.cases import each_case
from tests.kit.containerfiles import CONTAINERFILES, arguments, bases, instructions

ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PATHS = [pytest.param(path, id=path.suffix[1:]) for path in CONTAINERFILES]


def test_containerfiles_when_listed_then_one_per_image() -> None:
    assert [path.suffix[1:] for path in CONTAINERFILES] == ["frontend", "trtllm", "vllm"]


@pytest.mark.parametrize("path", PATHS)
def test_bases_when_resolved_then_pinned(path: Path) -> None:
    for name in bases(path):
        assert re.search(r":v?\d+\.\d+\.\d+", name), f"{name} is not pinned"


def test_bases_are_the_images_of_the_guides() -> None:
    of = {path.suffix[1:]: arguments(path) for path in CONTAINERFILES}
    release = of["trtllm"]["BASE_IMAGE_TAG"].partition("@")[0]  # before a digest
    assert of["trtllm"]["BASE_IMAGE"] == "nvcr.io/nvidia/tensorrt-llm/release"
    manifests = ROOT / "dynamo_trtllm/engines/trtllm/api_manifests"
    assert (manifests / f"{release}.json").is_file()
    (vllm,) = [requirement for requirement in EXTRAS["vllm"] if requirement.startswith("vllm")]
    low = re.search(r">=(\d+\.\d+)", vllm)
    assert low is not None
    assert of["vllm"]["BASE_IMAGE_TAG"].removeprefix("v").startswith(low[1])
    for name in ("trtllm", "vllm"):  # x86_64, and arm64 by the guides' build arguments
        assert (of[name]["ARCH"], of[name]["ARCH_ALT"]) == ("amd64", "x86_64")


@pytest.mark.parametrize("path", PATHS)
def test_image_when_run_then_not_as_root(path: Path) -> None:
    last_stage = instructions(path)[
        max(i for i, (word, _) in enumerate(instructions(path)) if word == "FROM") :
    ]
    users = [rest for word, rest in last_stage if word == "USER"]
    if not users:  # inherited
        users = [rest for word, rest in instructions(path) if word == "USER" and rest != "0"]
    assert users[-1] == "10001:10001"
    assert "useradd --uid 10001" in path.read_text()


@pytest.mark.parametrize("path", PATHS)
def test_sources_when_copied_then_they_are_in_the_build_context(path: Path) -> None:
    copied = [rest for word, rest in instructions(path) if word in ("COPY", "ADD")]
    assert copied
    for rest in copied:
        flags = [word for word in rest.split() if word.startswith("--")]
        if any(flag.startswith("--from=") for flag in flags):
            continue
        for source in [word for word in rest.split() if not word.startswith("--")][:-1]:
            assert (ROOT / source).exists()
            assert in_context(source), f"{source} is left out by .dockerignore"
    # without them no wheel is built
    assert any({"pyproject.toml", "README.md", "LICENSE"} <= set(rest.split()) for rest in copied)


def in_context(path: str) -> bool:
    """As docker reads .dockerignore, as far as ours goes: the last line that meets the path or a
    folder above wins.
    """
    parts = path.split("/")
    above = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    taken = True
    for raw in (ROOT / ".dockerignore").read_text().splitlines():
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        keeps = line.startswith("!")
        pattern = line.removeprefix("!").rstrip("/")
        if any(_meets(parent, pattern) for parent in above):
            taken = keeps
    return taken


def _meets(path: str, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return fnmatch.fnmatch(path.rpartition("/")[2], pattern[3:])
    return path.count("/") == pattern.count("/") and fnmatch.fnmatch(path, pattern)


@each_case(
    "path",
    [
        *(
            ".git/config",
            ".venv/bin/python",
            "tests/conftest.py",
            "deploy/.env",
            "deploy/compose/secrets/server.key",
        ),
        *(
            "dynamo_trtllm/__pycache__/errors.cpython-311.pyc",
            "benchmarks/results/run.json",
            "docs/api.md",
        ),
    ],
)
def test_context_excludes_secrets_history_and_caches(path: str) -> None:
    assert not in_context(path)


@pytest.mark.parametrize("name", ["trtllm", "vllm"])
def test_engine_image_replaces_no_base_package(name: str) -> None:
    """test_install_beside.py runs the script."""
    lines = instructions(ROOT / "deploy" / "container" / f"Containerfile.{name}")
    assert (
        "COPY",
        "--chmod=0755 deploy/container/install_beside /usr/local/bin/install_beside",
    ) in lines
    last_stage = lines[max(i for i, (word, _) in enumerate(lines) if word == "FROM") :]
    assert not [rest for word, rest in last_stage if word == "RUN" and "pip install" in rest]


@pytest.mark.parametrize("path", PATHS)
def test_entry_when_an_image_starts_then_its_module_exists(path: Path) -> None:
    modules = re.findall(r'"-m", "([\w.]+)"', path.read_text())
    assert modules
    for module in modules:
        assert importlib.util.find_spec(module) is not None
        assert importlib.util.find_spec(f"{module}.__main__") is not None


@pytest.mark.extra
def test_wheel_from_copied_files_has_engine_files_and_pages(tmp_path: Path) -> None:
    """As the first stage of every file does it."""
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "dynamo_trtllm",
        "benchmarks",
        "engine_configs",
        "kernels_config",
    ):
        (tmp_path / name).symlink_to(ROOT / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        ".",
    ]
    done = subprocess.run(
        [*command, "-w", tmp_path / "wheels"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    names = set(zipfile.ZipFile(wheel).namelist())
    engine_files = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "engine_configs").rglob("*.yaml")
    }
    assert {f"dynamo_trtllm/{name}" for name in engine_files} <= names
    assert {
        "dynamo_trtllm/frontend/docs.html",
        "dynamo_trtllm/kernels_config/fallback.yaml",
    } <= names


def test_frontend_image_when_installed_then_without_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [
        re.split(r"[\[<>= ]", requirement)[0]
        for requirement in project["dependencies"] + EXTRAS["bench"]
    ]
    assert not {"torch", "transformers", "vllm", "tensorrt-llm", "nixl"} & set(needed)


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("HF_TOKEN", "MODEL_PATH", "DOCKER")
    }
    env.pop("DYNAMO_CONTAINER_IMAGE", None)
    program = str(ROOT / "scripts" / "container_run")
    return subprocess.run(
        [program, *words], capture_output=True, text=True, check=False, env=env | environ
    )


def test_container_run_when_dry_then_the_guides_flags(tmp_path: Path) -> None:
    done = run(
        "--dry-run",
        "--model-path",
        str(tmp_path),
        "--workspace",
        str(tmp_path),
        HF_TOKEN="hf_secret",
    )
    words = shlex.split(done.stdout)
    assert words[:3] == ["docker", "run", "--rm"]
    line = " ".join(words)
    for flags in (
        "--gpus all",
        "--network host",
        "--ipc host",
        "--shm-size=10G",
        "--ulimit memlock=-1",
        "--ulimit stack=67108864",
        "--ulimit nofile=65536:65536",
        "--cap-add CAP_SYS_PTRACE",
        "-e TRTLLM_ENABLE_PDL=1",
        "-e TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL=True",
        f"--volume {tmp_path}:/model",
        f"--volume {tmp_path}:/workspace",
        "-e HF_TOKEN",
    ):
        assert f"{flags}" in line
    assert "hf_secret" not in line  # values show in process lists
    assert words[-2:] == [f"dynamo-trtllm/trtllm:{__version__}", "bash"]


def test_container_run_variables_change_image_and_command(tmp_path: Path) -> None:
    command = ["python3", "-m", "dynamo_trtllm", "--print-config"]
    done = run(
        "--dry-run",
        "--gpus",
        "none",
        "--",
        *command,
        DOCKER="podman",
        DYNAMO_CONTAINER_IMAGE="mine:1",
    )
    words = shlex.split(done.stdout)
    assert words[0] == "podman"
    assert "--gpus" not in words
    assert "HF_TOKEN" not in words
    assert words[-5:] == ["mine:1", *command]


def test_container_run_passes_secrets_with_their_folder(tmp_path: Path) -> None:
    (tmp_path / "client.env").write_text("NATS_SERVER=nats://a:1\n")
    words = shlex.split(run("--dry-run", "--client-env", str(tmp_path / "client.env")).stdout)
    assert words[words.index("--env-file") + 1] == str(tmp_path / "client.env")
    assert f"{tmp_path}:{tmp_path}:ro" in words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model-path", "/not/there"], "folder not found"),
        (["--imagine"], "unknown argument --imagine"),
        (["--image"], "--image needs a value"),
        (["--client-env", "/not/there"], "make_secrets"),
    ],
)
def test_container_run_when_given_nonsense_then_says_so(words: list[str], said: str) -> None:
    done = run("--dry-run", *words)
    assert done.returncode == 2
    assert said in done.stderr
