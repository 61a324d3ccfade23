"""The commands of README, Quickstart and "Serve a model", typed in the order of the page into a shell that
knows nothing else.

They run as printed but for ports, folders in /tmp and the size of the benchmark. The servers that
the page starts have the mock engine in place of the demo model, whose answers to the printed clients
are in demo_model/test_printed_clients.py. What takes minutes, gigabytes or GPUs is asked for its
help or its configuration instead.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dynamo_trtllm.support.network.addresses import free_ports
from tests.e2e.printed_pages import ACTIVATE, TYPED, blocks, make_clone, typed

END = "kill $(jobs -p)"
SHORT = (
    (r"^\./scripts/(demo|test)\b.*", r"./scripts/\1 --help"),
    (r"^dynamo-trtllm (chat|status|explain)\b.*", r"dynamo-trtllm \1 --help"),
    (r"^(MODEL_PATH=\S+ scripts/launch/\S+\.sh)\b.*", r"\1 --help"),
    (r"^(dynamo-trtllm worker --model-path .*)", r"\1 --print-config"),
    (r"^python3 -m venv .*|^pip install .*", ""),
    (r"^dynamo-trtllm serve .*", "dynamo-trtllm serve --help"),
)
# What one of the shortened commands of a page prints.
PRINTED = {
    "README.md": "usage: scripts/demo",
    "docs/getting-started.md": "usage: scripts/demo",
    "docs/serve-a-model.md": "tensor_parallel_size",
}


def shortened(block: str) -> str:
    for pattern, replacement in SHORT:
        block = re.sub(pattern, replacement, block, flags=re.MULTILINE)
    return block


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return make_clone(tmp_path)


@pytest.mark.timeout(240)
def test_printed_commands_that_serve_answer(clone: Path) -> None:
    (by_hand,) = [block for block in blocks("docs/serve-a-model.md") if END in block]
    quickstart = blocks("docs/getting-started.md")
    (measure,) = [block for block in quickstart if "dynamo-trtllm bench" in block]
    serve, _, stop = by_hand.partition(END)
    workers = re.findall(r"^(dynamo-trtllm worker .*) &$", serve, re.MULTILINE)
    assert len(workers) == 2
    accepted = [f"{worker} --print-config" for worker in workers]
    serve = serve.replace("--engine torch", "--engine mock")
    measure = measure.replace("--url", "--concurrency 1 --num-prompts 1 --url")
    script = "\n".join([ACTIVATE, *accepted, serve, measure, END + stop])
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
    assert said.count("arguments of the torch engine") == 2
    assert '"status":"ready"' in said
    assert said.count('"finish_reason":') == 1
    assert "report: benchmark-results/laptop-" in said


@pytest.mark.parametrize("page", TYPED)
def test_printed_commands_without_server_succeed(page: str, clone: Path) -> None:
    served = re.compile(r"curl|dynamo-trtllm bench")
    others = [shortened(block) for block in blocks(page) if not served.search(block)]
    said = typed("\n".join([ACTIVATE, *others]), clone)
    assert PRINTED[page] in said
