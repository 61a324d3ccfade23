"""The shipped engine_configs at the GPUs they are for, in every release they claim: notes are allowed, nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.cli.preflight import evaluate
from dynamo_trtllm.config.commands import PreflightConfig

pytestmark = pytest.mark.usefixtures("profiles_read_once")

FOLDER = Path(__file__).resolve().parents[4] / "engine_configs"
LAUNCH_PREFILL = "--max-num-tokens 20000 --max-batch-size 32 --free-gpu-memory-fraction 0.9"
LAUNCH_BOTH = " --tensor-parallel-size 4 --expert-parallel-size 4"
LAUNCH_DECODE = "--max-num-tokens 16384 --free-gpu-memory-fraction 0.9"
LAUNCH_AGG = "--max-batch-size 800 --free-gpu-memory-fraction 0.9"
BLACKWELL = ("b200", "gb200", "b300")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}

# folder, GPUs, further flags of prefill and of decode (of the aggregated worker: the first)
SHIPPED: dict[str, tuple[tuple[str, ...], str, str]] = {
    "gpt-oss-120b": (BLACKWELL, LAUNCH_PREFILL + LAUNCH_BOTH, LAUNCH_DECODE + LAUNCH_BOTH),
    "gpt-oss-120b/v0.5": (BLACKWELL, LAUNCH_PREFILL + LAUNCH_BOTH, "--free-gpu-memory-fraction 0.9"),
    "gpt-oss-120b/draft": (BLACKWELL, "", "--max-batch-size 128"),
    "gpt-oss-120b/k8s-disagg": (BLACKWELL, "", ""),
    "gpt-oss-120b/k8s-agg": (BLACKWELL, LAUNCH_AGG + LAUNCH_BOTH, ""),
    "gpt-oss-120b/hopper": (("h100", "h200"), "", ""),
    "gpt-oss-120b/nixl": (BLACKWELL, LAUNCH_PREFILL + LAUNCH_BOTH, LAUNCH_DECODE + LAUNCH_BOTH),
    "gpt-oss-120b/k8s-disagg/nixl": (BLACKWELL, "", ""),
    "gpt-oss-120b/hopper/nixl": (("h100", "h200"), "", ""),
    "gpt-oss-20b/nixl": (("h100", "h200", *BLACKWELL), "", ""),
    "llama-3.1-8b/nixl": (("a100", "l40s", "h100", "h200", *BLACKWELL), "", ""),
    "gpt-oss-20b": (("h100", "h200", *BLACKWELL), "", ""),
    "llama-3.1-8b": (("a100", "l40s", "h100", "h200", *BLACKWELL), "", ""),
}
# What the two Kubernetes targets and the guides say they are for: prompt, answer, concurrency.
LOADS = {
    "gpt-oss-120b": (32000, 256, 256),
    "gpt-oss-120b/v0.5": (32000, 256, 256),
    "gpt-oss-120b/nixl": (32000, 256, 256),
    "gpt-oss-120b/k8s-disagg/nixl": (8192, 1024, 1536),
    "gpt-oss-120b/draft": (1000, 2000, None),
    "gpt-oss-120b/k8s-disagg": (8192, 1024, 1536),
    "gpt-oss-120b/k8s-agg": (128, 1000, 3600),
}


def claimed(path: Path) -> list[str]:
    """The releases in a file's first line; the candidates of 1.3 by the name of the one that was read."""
    found = re.fullmatch(r"# releases: (.+)", path.read_text().partition("\n")[0])
    assert found is not None
    return [f"{name}27" if name.endswith("rc") else name for name in found[1].split(", ")]


def cases() -> list[Any]:
    """Return every GPU with the newest release and every release with the first GPU; the other pairs are long cases."""
    found = []
    for name, (gpus, _, _) in SHIPPED.items():
        (first, *_) = sorted((FOLDER / name).glob("*.yaml"))
        releases = claimed(first)
        for gpu, release in product(gpus, releases):
            is_default = gpu == gpus[0] or release == releases[-1]
            found.append(pytest.param(name, gpu, release, marks=() if is_default else pytest.mark.long))
    return found


def config(name: str, gpu: str, release: str, model: str) -> PreflightConfig:
    folder = FOLDER / name
    known = {"gpu": gpu, "release": release, "model_path": model}
    _, first, second = SHIPPED[name]
    if (folder / "agg.yaml").exists():
        return PreflightConfig(agg=folder / "agg.yaml", agg_args=first, **known)
    roles = {"prefill": folder / "prefill.yaml", "decode": folder / "decode.yaml"}
    return PreflightConfig(**roles, prefill_args=first, decode_args=second, **known)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


def check(chosen: PreflightConfig) -> None:
    report = evaluate(chosen)
    assert len(report.memory) == len(report.roles) == (2 if chosen.agg is None else 1)
    findings = [found for _, found in report.findings if found.severity != "note"]
    if report.release < "1.2" and chosen.agg is None:  # no file can mend these releases
        findings = [found for found in findings if found.rule != "unfetched-kv-leaks"]
    assert [asdict(found) for found in findings] == []


@pytest.mark.parametrize(("name", "gpu", "release"), cases())
def test_shipped_when_judged_for_its_gpu_and_releases_then_only_notes(
    name: str, gpu: str, release: str, llama: str
) -> None:
    check(config(name, gpu, release, llama if name.startswith("llama") else name.partition("/")[0]))


@pytest.mark.parametrize("name", LOADS)
def test_shipped_when_judged_for_the_load_it_is_for_then_only_notes(name: str) -> None:
    isl, osl, concurrency = LOADS[name]
    gpu = SHIPPED[name][0][0]
    chosen = config(name, gpu, claimed(next((FOLDER / name).glob("*.yaml")))[-1], "gpt-oss-120b")
    check(chosen.model_copy(update={"isl": isl, "osl": osl, "concurrency": concurrency}))


def test_shipped_when_listed_then_every_file_of_tensorrt_llm_is_judged() -> None:
    folders = {path.parent.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.yaml")}
    assert {name for name in folders if not name.startswith(("tiny-gpt-oss", "vllm"))} == set(SHIPPED)
