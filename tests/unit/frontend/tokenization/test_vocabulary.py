"""The vocabulary is unpacked once, checked, and repaired when the cached copy is not right."""

from __future__ import annotations

import gzip
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dynamo_trtllm.frontend.tokenization import o200k_tokenizer
from dynamo_trtllm.models import vocabulary
from dynamo_trtllm.protocol.errors import ConfigError


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_path_with_empty_cache_writes_the_checked_file(tmp_path: Path) -> None:
    path = vocabulary.o200k_ranks_path(tmp_path / "deep" / "er")
    assert sha256(path) == vocabulary.O200K_SHA256
    assert [found.name for found in path.parent.iterdir()] == ["o200k_base.tiktoken"]


def test_path_with_good_cached_file_writes_nothing(tmp_path: Path) -> None:
    before = vocabulary.o200k_ranks_path(tmp_path).stat()
    after = vocabulary.o200k_ranks_path(tmp_path).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_path_when_cached_file_is_cut_then_it_is_replaced(tmp_path: Path) -> None:
    (tmp_path / vocabulary.O200K_FILE).write_bytes(b"IQ== 0\n")
    assert sha256(vocabulary.o200k_ranks_path(tmp_path)) == vocabulary.O200K_SHA256


def test_path_when_several_race_then_all_get_the_whole_file(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(vocabulary.o200k_ranks_path, [tmp_path] * 8))
    assert [sha256(path) for path in paths] == [vocabulary.O200K_SHA256]
    assert len(list(tmp_path.iterdir())) == 1


def test_path_when_packed_file_is_another_then_says_both_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "o200k_base.tiktoken.gz").write_bytes(gzip.compress(b"IQ== 0\n"))
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    with pytest.raises(ConfigError, match="reinstall dynamo_trtllm") as caught:
        vocabulary.o200k_ranks_path(tmp_path / "cache")
    assert vocabulary.O200K_SHA256 in caught.value.message
    assert hashlib.sha256(b"IQ== 0\n").hexdigest() in caught.value.message
    assert not (tmp_path / "cache").exists()


def test_path_without_packed_file_says_what_to_reinstall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    with pytest.raises(ConfigError, match="reinstall dynamo_trtllm"):
        vocabulary.o200k_ranks_path(tmp_path / "cache")


def test_path_when_folder_can_not_be_made_then_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="make the folder writable"):
        vocabulary.o200k_ranks_path(tmp_path / "file" / "cache")


def test_ranks_when_read_then_they_number_all_ordinary_tokens() -> None:
    assert sorted(vocabulary.mergeable_ranks().values()) == list(range(vocabulary.FIRST_SPECIAL))


def test_specials_fill_the_vocabulary_of_openai_harmony() -> None:
    specials = vocabulary.harmony_specials()
    assert sorted(specials.values()) == list(
        range(vocabulary.FIRST_SPECIAL, vocabulary.HARMONY_VOCAB_SIZE)
    )
    encoding = o200k_tokenizer.load_tokenizer().harmony
    assert {encoding.decode([number]): number for number in specials.values()} == specials


def test_load_when_called_in_both_ways_then_loads_once() -> None:
    assert o200k_tokenizer.load_tokenizer() is o200k_tokenizer.load_tokenizer(
        vocabulary.default_cache_dir()
    )


def test_load_in_several_threads_shares_one_copy(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        loaded = list(pool.map(o200k_tokenizer.load_tokenizer, [tmp_path] * 3))
    assert len({id(loaded_ranks) for loaded_ranks in loaded}) == 1
