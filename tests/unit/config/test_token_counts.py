"""Numbers of tokens with a suffix, in flags, deployment files and shapes."""

from __future__ import annotations

import pytest

from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.config.token_counts import parse_tokens
from dynamo_trtllm.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "count"),
    [("8192", 8192), ("8k", 8000), ("8K", 8192), ("25.6k", 25_600), ("1m", 10**6), ("1M", 1 << 20)],
)
def test_suffixes_are_those_of_vllm(text: str, count: int) -> None:
    assert parse_tokens(text) == count


@pytest.mark.parametrize("text", ["", "k", "8x", "8kk", "8 k", "1.5", "8,192", "1e3", "nan", "٣k"])
def test_text_that_is_no_whole_number_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as 8192, 8k \(8,000\) or 8K \(8,192\)"):
        parse_tokens(text)


@pytest.mark.parametrize("flag", ["--max-seq-len", "--max-model-len", "--max-num-tokens"])
def test_flags_of_lengths_accept_a_suffix(flag: str) -> None:
    config = load(WorkerConfig, prog="x", argv=["--model", "m", flag, "8K"], environ={})
    assert 8192 in (config.max_seq_len, config.max_num_tokens)


@pytest.mark.parametrize("value", ["8 tokens", "0", "-5"])
def test_wrong_length_is_an_error_of_its_flag(value: str) -> None:
    with pytest.raises(ConfigError, match=f"--max-seq-len is '{value}'"):
        load(WorkerConfig, prog="x", argv=["--model", "m", "--max-seq-len", value], environ={})
