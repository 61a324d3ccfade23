"""Models of a hub: found in the cache, looked up, downloaded, or refused in one line.

The hub runs on localhost.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.models import hub as hub_module
from dynamo_trtllm.models.hub import Hub, Show
from dynamo_trtllm.protocol.errors import ConfigError
from tests.kit.cases import each_case
from tests.kit.hub_server import COMMIT, NAME, HubServer
from tests.kit.waiting import SOON_S

# TensorRT-LLM 1.1 and 1.2 pin a transformers that needs huggingface_hub below 1.0
IS_BEFORE_1 = importlib.metadata.version("huggingface_hub").startswith("0.")
WEIGHTS = bytes(range(256)) * 4000
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{ }",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
    "README.md": b"not needed",
    "pytorch_model.bin": b"not needed",
    "consolidated.safetensors": b"not needed",
    "original/model.safetensors": b"not needed",
}
NEEDED = {
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
}


@pytest.fixture
def server() -> Iterator[HubServer]:
    running = HubServer(FILES)
    yield running
    running.close()


@pytest.fixture
def hub(server: HubServer, tmp_path: Path) -> Hub:
    return Hub(endpoint=server.url, cache_dir=tmp_path / "cache")


def cached_folder(cache: Path) -> Path:
    """Return an empty folder for the files of the model, as another program makes it in a cache."""
    of_model = cache / f"models--{NAME.replace('/', '--')}"
    folder = of_model / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (of_model / "refs").mkdir()
    (of_model / "refs" / "main").write_text(COMMIT)
    return folder


def test_download_fetches_only_needed_files(hub: Hub, server: HubServer) -> None:
    found = hub.find(NAME)
    assert (found.revision, found.weight_bytes) == (COMMIT, len(WEIGHTS))
    assert found.download_bytes == sum(len(FILES[name]) for name in NEEDED - {"config.json"})
    shown: list[str] = []
    folder = hub.download(found, shown.append)
    assert {path.name for path in folder.iterdir()} == NEEDED
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert shown[0] == f"downloading {NAME}: 0.0 GiB to {folder}"
    assert shown[-1].startswith("downloaded 100% of")


def test_find_when_the_extra_hub_is_missing_then_it_is_named(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"needs huggingface_hub; run pip install -e '\.\[hub\]'"):
        hub.find(NAME)


def test_find_in_cache_makes_no_request(hub: Hub, server: HubServer) -> None:
    folder = hub.download(hub.find(NAME), lambda _: None)
    server.requests.clear()
    server.info_status = 500
    again = hub.find(NAME)
    assert (again.folder, again.download_bytes, again.weight_bytes) == (folder, 0, len(WEIGHTS))
    assert hub.download(again, lambda _: None) == folder
    assert server.requests == []


def test_find_completes_a_partly_cached_model(hub: Hub, server: HubServer, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    server.files |= {"model.safetensors.index.json": json.dumps(index).encode()}
    server.files |= {"model-1.safetensors": b"1" * 100, "model-2.safetensors": b"2" * 200}
    del server.files["model.safetensors"]
    folder = cached_folder(tmp_path / "cache")
    for name in NEEDED & server.files.keys() | {
        "model.safetensors.index.json",
        "model-1.safetensors",
    }:
        (folder / name).write_bytes(server.files[name])
    found = hub.find(NAME)
    assert found.download_bytes == 200
    assert hub.download(found, lambda _: None) == folder
    assert (folder / "model-2.safetensors").read_bytes() == b"2" * 200


@each_case("lacking", ["tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"])
def test_find_completes_what_another_program_cached(lacking: str, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    server = HubServer(
        {name: FILES[name] for name in NEEDED - {"model.safetensors"}}
        | dict.fromkeys(index["weight_map"].values(), b"1" * 100)
        | {"model.safetensors.index.json": json.dumps(index).encode()}
    )
    try:
        cache = tmp_path / lacking
        folder = cached_folder(cache)
        for name in server.files.keys() - {lacking}:
            (folder / name).write_bytes(server.files[name])
        hub = Hub(endpoint=server.url, cache_dir=cache)
        found = hub.find(NAME)
        assert found.download_bytes == len(server.files[lacking])
        assert (hub.download(found, lambda _: None) / lacking).is_file()
    finally:
        server.close()


def test_find_of_a_cached_model_in_one_part_needs_no_index(hub: Hub, server: HubServer) -> None:
    server.files["model-00001-of-00001.safetensors"] = server.files.pop("model.safetensors")
    folder = hub.download(hub.find(NAME), lambda _: None)
    server.requests.clear()
    assert hub.find(NAME).folder == folder
    assert server.requests == []


def test_find_of_cached_gpt_oss_needs_no_tokenizer(hub: Hub, server: HubServer) -> None:
    server.files["config.json"] = b'{"model_type": "gpt_oss"}'
    for name in ("tokenizer.json", "tokenizer_config.json"):
        del server.files[name]
    folder = hub.download(hub.find(NAME), lambda _: None)
    server.requests.clear()
    assert hub.find(NAME).folder == folder
    assert server.requests == []


def test_download_continues_after_a_cut_connection(
    hub: Hub, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)  # pause between attempts of huggingface_hub
    # what is kept of a cut download
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    server.cut_after = [300_000]
    if IS_BEFORE_1:  # it does not try again by itself
        with pytest.raises(ConfigError, match="can't be reached or broke off"):
            hub.download(hub.find(NAME), lambda _: None)
    folder = hub.download(hub.find(NAME), lambda _: None)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert server.ranges == [f"bytes={4 << 16}-"]


def test_download_after_failure_keeps_complete_files(
    hub: Hub, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    server.cut_after = [0] * 20
    with pytest.raises(ConfigError, match="can't be reached or broke off"):
        hub.download(hub.find(NAME), lambda _: None)
    server.cut_after = []
    found = hub.find(NAME)
    assert found.download_bytes == len(WEIGHTS)
    assert (hub.download(found, lambda _: None) / "model.safetensors").read_bytes() == WEIGHTS


def test_download_interrupted_ends_at_the_next_bytes(
    hub: Hub, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    events: list[threading.Event] = []

    def progress(total: int, show: Show, is_stopping: threading.Event) -> type[Any]:
        events.append(is_stopping)
        return real(total, show, is_stopping)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert events[0].wait(SOON_S)

    real = hub_module._progress
    monkeypatch.setattr(hub_module, "_progress", progress)
    server.on_half = interrupt
    found = hub.find(NAME)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        hub.download(found, lambda _: None)
    assert signal.getsignal(signal.SIGINT) is handler
    assert not (found.folder / "model.safetensors").exists()
    partial = [
        path for path in found.folder.parents[2].rglob("*.incomplete") if path.stat().st_size
    ]
    assert IS_BEFORE_1 or not partial  # before 1.0 they stay, and the next download continues them
    assert all(path.stat().st_size < len(WEIGHTS) for path in partial)


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (
            401,
            "RepoNotFound",
            "has no such model, or it is private; check the name, or set HF_TOKEN",
        ),
        (403, "GatedRepo", "access is restricted; accept its terms at"),
        (404, "RepoNotFound", "has no such model, or it is private"),
        (404, "RevisionNotFound", "there is no revision 'v1'; pass another --revision"),
        (500, "", "answered with status 500; try again, or pass a model folder"),
    ],
)
def test_find_when_the_hub_refuses_then_one_line_says_why(
    hub: Hub, server: HubServer, status: int, code: str, says: str
) -> None:
    server.info_status = status
    server.info_error = code
    with pytest.raises(ConfigError) as failed:
        hub.find(NAME, "v1")
    assert failed.value.message.startswith(f"model {NAME}: ")
    assert says in failed.value.message
    assert "\n" not in failed.value.message


def test_find_of_gated_files_tries_nothing_large(hub: Hub, server: HubServer) -> None:
    server.file_status = 403
    server.file_error = "GatedRepo"
    with pytest.raises(ConfigError, match="access is restricted; accept its terms at"):
        hub.find(NAME)
    assert not [
        line for line in server.requests if line.startswith("GET") and line.endswith("safetensors")
    ]


@pytest.mark.skipif(
    IS_BEFORE_1, reason="before 1.0, huggingface_hub reads the variable when it makes its sessions"
)
def test_find_offline_without_cache_makes_no_request(
    hub: Hub, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="not in the cache, and HF_HUB_OFFLINE is set"):
        hub.find(NAME)
    assert server.requests == []


def test_find_when_no_hub_answers_then_one_line_names_it(tmp_path: Path) -> None:
    hub = Hub(endpoint="http://127.0.0.1:9", cache_dir=tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"http://127.0.0.1:9 can't be reached .*; check the network or HF_ENDPOINT",
    ):
        hub.find(NAME)


@pytest.mark.parametrize(
    ("lacking", "says"),
    [
        ("config.json", "no config.json at"),
        ("model.safetensors", "no weights in the safetensors format at"),
        ("tokenizer.json", "no tokenizer.json at"),
        ("tokenizer_config.json", "no tokenizer_config.json at"),
    ],
)
def test_find_of_incomplete_model_is_rejected_early(
    hub: Hub, server: HubServer, lacking: str, says: str
) -> None:
    del server.files[lacking]
    with pytest.raises(ConfigError, match=says):
        hub.find(NAME)


def test_download_with_gone_progress_reader_is_an_error(hub: Hub) -> None:
    def show(line: str) -> None:
        if line.startswith("downloaded"):
            raise BrokenPipeError

    model = hub.find(NAME)
    with pytest.raises(BrokenPipeError):
        hub.download(model, show)


def test_find_with_unwritable_cache_names_the_folder(server: HubServer) -> None:
    with pytest.raises(ConfigError, match=r"/proc/none.*: No such file or directory; correct this"):
        Hub(endpoint=server.url, cache_dir=Path("/proc/none")).find(NAME)


def test_download_on_too_small_disk_fetches_nothing(hub: Hub, server: HubServer) -> None:
    server.sizes = {"model.safetensors": 1 << 60}
    found = hub.find(NAME)
    server.requests.clear()
    with pytest.raises(
        ConfigError, match=r"needs 1073741824\.0 GiB in .* free; free space, or set HF_HOME"
    ):
        hub.download(found, lambda _: None)
    assert server.requests == []


def test_find_when_a_token_is_set_then_the_hub_gets_it(
    hub: Hub, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.find(NAME)
    assert server.token == "Bearer hf_secret"


def test_find_when_a_revision_is_named_then_it_is_looked_up(hub: Hub, server: HubServer) -> None:
    hub.find(NAME, "v1")
    assert f"GET /api/models/{NAME}/revision/v1" in server.requests


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"{}", b'{"weight_map": ["a"]}', b'{"weight_map": {"a": 1}}']
)
def test_broken_weight_index_in_the_cache_is_named(
    hub: Hub, server: HubServer, content: bytes
) -> None:
    found = hub.find(NAME)
    folder = hub.download(found, lambda _: None)
    (folder / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(ConfigError, match="is no index of weights; remove it"):
        hub.find(NAME)
