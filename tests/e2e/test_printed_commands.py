"""The commands of README and getting-started, typed in the order of the page into a shell that
knows nothing else.

They run as printed but for ports, folders in /tmp and the size of the benchmark. What takes
minutes, gigabytes or GPUs is asked for its help or its configuration instead.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from dynamo_trtllm.support.network.addresses import free_ports

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "docs/getting-started.md")}
END = "kill $(jobs -p)"
SHORT = (
    (r"^\./scripts/(demo|test)\b.*", r"./scripts/\1 --help"),
    (r"^(MODEL_PATH=\S+ scripts/launch/\S+\.sh)\b.*", r"\1 --help"),
    (r"^(dynamo-trtllm worker --model-path .*)", r"\1 --print-config"),
    (r"^python3 -m venv .*|^pip install .*", ""),
    (r"^dynamo-trtllm serve .*", "dynamo-trtllm serve --help"),
)


def blocks(page: str) -> list[str]:
    """Return the shell blocks of a page in their order, every command on one line where it can
    be.
    """
    found = re.findall(r"^( *)```bash\n(.*?)^ *```", PAGES[page], re.DOTALL | re.MULTILINE)
    return [
        re.sub(rf"^{indent}", "", text, flags=re.MULTILINE).replace("\\\n", " ")
        for indent, text in found
    ]


def shortened(block: str) -> str:
    for pattern, replacement in SHORT:
        block = re.sub(pattern, replacement, block, flags=re.MULTILINE)
    return block


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The repository's files beside the environment that the set-up makes; new files stay out of
    the repository.
    """
    folder = tmp_path / "clone"
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.name not in (".git", ".venv", "benchmark-results"):
            (folder / path.name).symlink_to(path)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def typed(script: str, folder: Path, **environment: str) -> str:
    """Run the lines in bash until one fails. Return all that they print."""
    shell = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(Path.home()),
        "TMPDIR": str(folder),
    }
    # a pipe would stay open as long as what the shell has started
    with (folder / "output").open("w+b") as output:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env=shell | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout=200)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output.seek(0)
            said = output.read().decode(errors="replace")
    assert process.returncode == 0, said
    return said


@pytest.mark.timeout(240)
def test_printed_commands_that_serve_answer(clone: Path) -> None:
    started = blocks("docs/getting-started.md")
    (by_hand,) = [block for block in started if END in block]
    (measure,) = [block for block in started if "benchmarks.profile" in block]
    (ask,) = [block for block in started if "dynamo-trtllm chat" in block]
    pages = [PAGES["README.md"], (ROOT / "docs/api.md").read_text(encoding="utf-8")]
    clients = [
        client for page in pages for client in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    ]
    assert len(clients) == 4
    serve, _, stop = by_hand.partition(END)
    activate = "source .venv/bin/activate"
    # One process, which imports the SDK once; each program has its own names.
    with_sdk = (
        f"python - <<'END'\nfor text in {clients!r}:\n    exec(text, {{'__name__':"
        " '__main__'})\nEND"
    )
    measure = measure.replace("--url", "--concurrency 1 --requests 1 --url")
    script = "\n".join([activate, serve, ask, with_sdk, measure, END + stop])
    first = free_ports(4)
    http, etcd, peers, nats = range(first, first + 4)
    etcd_url = f"http://127.0.0.1:{etcd}"
    peer = f"http://127.0.0.1:{peers}"
    for printed, taken in (
        ("8000", str(http)),
        ("nats-server ", f"nats-server -p {nats} "),
        (
            "etcd --data",
            (
                f"etcd --listen-client-urls {etcd_url} --advertise-client-urls {etcd_url}"
                f" --listen-peer-urls {peer} --data"
            ),
        ),
    ):
        assert printed in script
        script = script.replace(printed, taken)
    said = typed(script, clone, ETCD_ENDPOINTS=etcd_url, NATS_SERVER=f"nats://127.0.0.1:{nats}")
    assert said.count('"finish_reason":"stop"') == 2
    assert '"status":"ready"' in said
    assert said.count("Disaggregated serving") >= 2  # of curl and of the SDK
    assert "get_system_health {" in said
    assert re.search(r'\{\s*"state":\s*"(healthy|failing)"\s*\}', said)
    assert "report: benchmark-results/laptop-" in said


@pytest.mark.parametrize("page", PAGES)
def test_printed_commands_without_server_succeed(page: str, clone: Path) -> None:
    served = re.compile(r"curl|benchmarks\.profile")
    others = [shortened(block) for block in blocks(page) if not served.search(block)]
    said = typed("\n".join(["source .venv/bin/activate", *others]), clone)
    assert "usage: scripts/demo" in said
    assert ("tensor_parallel_size" in said) == (page != "README.md")
