"""Print the test files that a change touches, one a line, for `scripts/test --changed`.

A changed Python file touches the tests that import it, directly or through other modules. A file of
a package that is not Python touches the modules beside it and those that name it; any other file
touches the tests that name it or its folder. Processes that a test starts are no imports: a test
that starts a whole deployment is found only by what it imports itself.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
WITH_DATA = ("dynamo_trtllm", "benchmarks")
PACKAGES = (*WITH_DATA, "scripts", "tests")
ROOT_CONFTEST = "tests.conftest"
# A change of one of these may change the result of any test.
CONCERNS_ALL = frozenset({"pyproject.toml", "scripts/setup", "scripts/test", "tests/conftest.py"})
ALL_TESTS = "tests"


def changed_files(root: Path, ref: str) -> list[str]:
    """Return the paths of files that differ from the commit where this branch left `ref`.

    Files that are not committed yet are included.

    Raises:
        SystemExit: git does not know `ref`.
    """
    base = _git(root, "merge-base", ref, "HEAD")
    if base is None:
        print(
            f"scripts/test: git finds no common commit of {ref} and HEAD. Pass --changed=REF with a"
            " branch or commit.",
            file=sys.stderr,
        )
        raise SystemExit(2)
    differing = _git(root, "diff", "--name-only", "--no-renames", base.strip()) or ""
    untracked = _git(root, "ls-files", "--others", "--exclude-standard") or ""
    return sorted({*differing.splitlines(), *untracked.splitlines()})


def _git(root: Path, *words: str) -> str | None:
    """Return the output of git; None if it fails."""
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def import_graph() -> grimp.ImportGraph:
    """Return which module of this repository imports which."""
    return grimp.build_graph(*PACKAGES, cache_dir=None)


def touched_tests(changed: Iterable[str], graph: grimp.ImportGraph) -> list[str]:
    """Return the test files that these files touch, or the folder of all tests.

    Args:
        changed: paths relative to the repository.
        graph: the imports of this repository.
    """
    paths = set(changed)
    if paths & CONCERNS_ALL:
        return [ALL_TESTS]
    modules = {module for path in paths for module in _modules_of(Path(path), graph.modules)}
    importing = {found for module in modules for found in graph.find_downstream_modules(module)}
    tests: set[str] = set()
    for module in modules | importing:
        tests.update(_tests_of(module))
    return sorted(tests)


def _modules_of(path: Path, known: set[str]) -> Iterator[str]:
    """Yield the modules that stand for a changed file in the graph of imports."""
    if path.suffix == ".py":
        if _module_name(path) in known:
            yield _module_name(path)
        return
    # The ways in which the text of a module may name the file.
    names = {f'"{path.name}"', f"/{path.name}"}
    top = path.parts[0]
    if top in WITH_DATA:
        # The modules beside the file may read all files there.
        folder = _module_name(path.parent)
        yield from (module for module in known if module.rpartition(".")[0] == folder)
        readers = top
    else:
        readers = "tests"
        # A test that names the top folder may read any file in it. Nearly all of them name "tests".
        if top != "tests":
            names |= {f'"{top}"', f'"{top}/'}
    for source in (ROOT / readers).rglob("*.py"):
        module = _module_name(source.relative_to(ROOT))
        text = source.read_text(encoding="utf-8")
        if module in known and any(name in text for name in names):
            yield module


def _module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _tests_of(module: str) -> Iterator[str]:
    """Yield the test file that a module is, or the test files that use it as their conftest."""
    path = Path(*module.split(".")).with_suffix(".py")
    if path.parts[0] != "tests":
        return
    if path.name.startswith("test_"):
        yield str(path)
    elif path.name == "conftest.py" and module != ROOT_CONFTEST:
        # The conftest of all tests is left out: it imports modules that nearly every change
        # touches, but only to start servers.
        for test in (ROOT / path.parent).rglob("test_*.py"):
            yield str(test.relative_to(ROOT))


def main() -> None:
    """Print the test files that differ from, or depend on what differs from, the given commit."""
    ref = sys.argv[1] if len(sys.argv) > 1 else "main"
    for test in touched_tests(changed_files(ROOT, ref), import_graph()):
        print(test)


if __name__ == "__main__":
    main()
