"""The clients that the documentation prints, with the answers of the demo model: curl, programs
with OpenAI's SDK, and the commands chat and status.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.demo_model.torch_cluster import TorchCluster
from tests.e2e.printed_pages import ACTIVATE, PAGES, REQUESTED, blocks, make_clone, typed

pytestmark = pytest.mark.timeout(240)  # the first test also starts the cluster


def test_printed_clients_get_the_answers_of_the_model(
    torch_cluster: TorchCluster, tmp_path: Path
) -> None:
    (by_hand,) = [block for block in blocks("docs/serve-a-model.md") if "kill $(jobs" in block]
    quickstart = blocks("docs/getting-started.md")
    (ask,) = [block for block in quickstart if "dynamo-trtllm chat" in block]
    (first_chat,) = re.findall(
        r"^curl \S+/v1/chat/completions .*?'$", by_hand, re.DOTALL | re.MULTILINE
    )
    requests = ["\n".join(block for block in blocks(page) if "curl" in block) for page in REQUESTED]
    pages = [PAGES["README.md"], PAGES["docs/api.md"]]
    clients = [
        client for page in pages for client in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    ]
    assert len(clients) == 4
    # One process, which imports the SDK once; each program has its own names.
    with_sdk = (
        f"python - <<'END'\nfor text in {clients!r}:\n    exec(text, {{'__name__':"
        " '__main__'})\nEND"
    )
    # The cluster serves another model beside that of the page.
    ask = ask.replace("dynamo-trtllm chat", "dynamo-trtllm chat --model tiny-gpt-oss")
    scripts = [first_chat, ask, *requests, with_sdk]
    assert "".join(scripts).count("8000") >= 12
    _, _, port = torch_cluster.cluster.frontend.url().rpartition(":")
    names = ("ETCD_ENDPOINTS", "NATS_SERVER", "DYN_NAMESPACE")
    environment = {name: torch_cluster.cluster.env[name] for name in names}

    def run(number: int, script: str) -> str:
        folder = tmp_path / str(number)
        folder.mkdir()
        script = "\n".join([ACTIVATE, script.replace("8000", port)])
        return typed(script, make_clone(folder), **environment)

    # At once, because a step of the model serves all of them.
    with ThreadPoolExecutor(len(scripts)) as pool:
        said = "\n".join(pool.map(run, range(len(scripts)), scripts))
    assert said.count('"finish_reason":"stop"') >= 3
    # of tokens, a response, a message, and statistics
    for field in ('"token_strs":', '"object":"response"', '"type":"message"', '"phase_s":'):
        assert field in said
    assert said.count("Disaggregated serving") >= 2  # of curl and of the SDK
    assert "get_system_health {" in said
    assert re.search(r'\{\s*"state":\s*"(healthy|failing)"\s*\}', said)
