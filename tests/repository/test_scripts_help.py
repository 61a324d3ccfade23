"""Every script of the repository explains itself: `--help` prints each flag that it accepts and
changes nothing.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (".ci", "scripts", "deploy", "examples")
SCRIPTS = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and path.stat().st_mode & 0o100 and path.read_bytes().startswith(b"#!")
)
MODULES = ("benchmarks.client", "benchmarks.profile", "benchmarks.startup")


def helped(*command: str) -> str:
    done = subprocess.run(
        [*command, "--help"], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: " in done.stdout
    return done.stdout


def accepted(source: str) -> set[str]:
    """Return the long flags that the cases of a shell script and the parser of a Python script
    take.
    """
    cases = re.findall(r"^\s*((?:--?[\w-]+=?\*?(?: \| )?)+)\)", source, re.MULTILINE)
    options = re.findall(r"add(?:_argument)?\(\s*\"(--[\w-]+)\"", source)
    return {*re.findall(r"--[\w-]+", " ".join(cases)), *options} - {"--help"}


def test_accepted_flags_are_found_in_both_script_kinds() -> None:
    assert accepted("    -h | --help) usage ;;\n    --size | --list)\n    --model=*) m=1 ;;\n") == {
        "--size",
        "--list",
        "--model",
    }
    assert accepted('parser.add_argument("--check", action="store_true")\nadd(\n    "--url",') == {
        "--check",
        "--url",
    }


def test_scripts_when_counted_then_those_of_every_folder() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in SCRIPTS} == set(FOLDERS)
    assert len(SCRIPTS) >= 20


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_help_names_every_flag_and_exits_with_0(script: Path) -> None:
    said = set(re.findall(r"--[\w-]+", helped(str(script))))
    assert accepted(script.read_text()) - said == set()


@pytest.mark.parametrize("module", MODULES)
def test_benchmark_help_explains_every_option(module: str) -> None:
    said = helped(sys.executable, "-m", module)
    assert f"usage: python -m {module} " in said
    bare = re.findall(r"^  (--[\w-]+)(?: \S+)?\n(?! {4,}\S)", said, re.MULTILINE)
    assert bare == []
