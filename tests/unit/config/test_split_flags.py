"""Words of one command line go to the settings that have the flag."""

from __future__ import annotations

from dynamo_trtllm.config.commands import ServeConfig
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.config.split_flags import split_words
from tests.kit.cases import each_case


@each_case(
    ("typed", "serve", "worker", "frontend"),
    [
        ("m --dry-run", "m --dry-run", "", ""),
        ("--max-seq-len 64 m", "m", "--max-seq-len 64", ""),
        ("--max-seq-len=64 m", "m", "--max-seq-len=64", ""),
        ("m --router-mode direct --port 1", "m --port 1", "", "--router-mode direct"),
        ("m --no-publish-kv-events x", "m x", "--no-publish-kv-events", ""),
        ("m --stall-timeout-s 9", "m", "--stall-timeout-s 9", "--stall-timeout-s 9"),
        ("m --unknown 3", "m --unknown 3", "", ""),
        ("m --max-seq-len", "m", "--max-seq-len", ""),
    ],
)
def test_split_words_gives_each_flag_to_its_settings(
    typed: str, serve: str, worker: str, frontend: str
) -> None:
    parts = split_words(typed.split(), (ServeConfig, WorkerConfig, FrontendConfig))
    assert [" ".join(part) for part in parts] == [serve, worker, frontend]
