"""What scripts/setup prints, and when it runs.

The files of constraints/ are complete and have hashes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.kit.cases import each_case

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints"
TABLES = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = TABLES["project"]
BUILD = TABLES["build-system"]
EXTRAS = PROJECT["optional-dependencies"]
TOOLS = {
    "pytest",
    "mypy",
    "ruff",
    "mkdocs",
    "matplotlib",
    "kubernetes-validate",
    "schemathesis",
    "cyclonedx-bom",
}
PYTHON = """#!/bin/sh
case "$1 $2" in
    "scripts/pick_torch --is-there") exit 0 ;;
    "--version "*) echo Python 3.11.0 ;;
esac
"""


def pins(name: str) -> dict[str, str]:
    """Return the versions by package. Fail if a package has no hash."""
    text = re.sub(r"^\s*#.*\n", "", (CONSTRAINTS / name).read_text(), flags=re.MULTILINE)
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", text.strip()):
        line, *hashes = entry.replace("\\\n", "\n").splitlines()
        requirement = Requirement(line)
        assert hashes
        assert all(re.fullmatch(r"\s*--hash=sha256:[0-9a-f]{64}\s*", digest) for digest in hashes)
        (version,) = [
            specifier.version for specifier in requirement.specifier if specifier.operator == "=="
        ]
        assert found.setdefault(requirement.name, version) == version
    return found


@each_case("path", sorted(CONSTRAINTS.iterdir()))
def test_constraints_pin_versions_and_hashes(path: Path) -> None:
    assert pins(path.name)
    assert "://" not in path.read_text()


def test_constraints_of_the_demo_match_the_tests() -> None:
    demo = pins("demo.txt")
    dev = pins("dev.txt")
    assert demo.items() <= dev.items()
    for image in ("build.txt", "frontend.txt", "bench.txt", "beside.txt"):
        assert pins(image).items() <= dev.items()
    assert TOOLS & dev.keys() == TOOLS
    assert TOOLS & demo.keys() == set()
    assert [name for name in dev if re.match(r"(torch|triton|nvidia-(?!ml-py)|cuda-)", name)] == []


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("demo.txt", ("torch", "nixl", "local", "cli", "hub")),
        ("dev.txt", ("bench", "dev")),
        ("frontend.txt", ("hub",)),
        ("bench.txt", ("hub", "bench")),
        ("beside.txt", ()),
    ],
)
def test_constraints_satisfy_pyproject(name: str, extras: tuple[str, ...]) -> None:
    wanted = [*PROJECT["dependencies"], *(needed for key in extras for needed in EXTRAS[key])]
    check_pins(name, wanted)


def test_constraints_of_smollm2_and_builds_satisfy_pyproject() -> None:
    check_pins("smollm2.txt", EXTRAS["smollm2"])
    check_pins("build.txt", BUILD["requires"])


def check_pins(name: str, wanted: list[str]) -> None:
    """Check that a file has a version in the range of each requirement."""
    found = pins(name)
    for requirement in map(Requirement, wanted):
        if requirement.name != "torch":  # chosen for the machine
            assert found[canonicalize_name(requirement.name)] in requirement.specifier, (
                "run scripts/lock"
            )


@pytest.fixture
def setup(tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """scripts/setup as it is, in a folder where uv prints much and Python little."""
    shutil.copytree(CONSTRAINTS, tmp_path / "constraints")
    for name in ("pyproject.toml", "scripts/setup", "scripts/pick_torch"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name, text in (
        (".venv/bin/python", PYTHON),
        ("scripts/uv", '#!/bin/sh\necho "$@" >>calls\nseq 500\n'),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*words: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [tmp_path / "scripts/setup", *words], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr

    return run


def test_setup_prints_few_lines_and_logs_details(
    setup: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    status, said, errors = setup()
    assert (status, errors) == (0, "")
    assert len(said.splitlines()) <= 12
    assert "details: .venv/setup.log" in said
    assert "\n500\n" in (tmp_path / ".venv/setup.log").read_text()


def test_setup_installs_only_when_a_pin_changed(
    setup: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    assert setup()[1] != ""
    assert setup() == (0, "", "")
    with (tmp_path / "constraints/demo.txt").open("a") as file:
        file.write("# changed\n")
    assert "installing" in setup()[1]


def test_setup_adds_tools_once(setup: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    setup()
    assert "-r constraints/dev.txt" not in (tmp_path / "calls").read_text()
    setup("--dev")
    assert "--require-hashes -r constraints/dev.txt" in (tmp_path / "calls").read_text()
    assert setup() == setup("--dev") == (0, "", "")


def test_setup_shows_the_log_end_of_a_failed_step(
    setup: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    uv = tmp_path / "scripts/uv"
    works = uv.read_text()
    uv.write_text("#!/bin/sh\nseq 500\necho no route to the index >&2\nexit 2\n")
    status, said, errors = setup()
    assert status == 1
    assert said.endswith("failed; the end of .venv/setup.log:\n")
    assert errors.endswith("500\nno route to the index\n")
    assert len(errors.splitlines()) == 15
    uv.write_text(works)
    status, said, _ = setup()
    assert status == 0
    assert "done in" in said
