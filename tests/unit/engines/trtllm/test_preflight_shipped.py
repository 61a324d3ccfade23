"""The shipped engine_configs at the GPUs they are for, in every release they claim: notes are
allowed, nothing else.
"""

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
from tests.kit.cases import each_case
from tests.unit.engines.trtllm.shipped_pairs import FOLDER, LLAMA, LOADS, SHIPPED, config


def claimed(path: Path) -> list[str]:
    """The releases in a file's first line; the candidates of 1.3 by the name of the one that was
    read.
    """
    found = re.fullmatch(r"# releases: (.+)", path.read_text().partition("\n")[0])
    assert found is not None
    return [f"{name}27" if name.endswith("rc") else name for name in found[1].split(", ")]


def cases() -> list[Any]:
    """Return every GPU with the newest release and every release with the first GPU; the other
    pairs are long cases.
    """
    found = []
    for name, (gpus, _, _) in SHIPPED.items():
        (first, *_) = sorted((FOLDER / name).glob("*.yaml"))
        releases = claimed(first)
        for gpu, release in product(gpus, releases):
            is_default = gpu == gpus[0] or release == releases[-1]
            found.append(
                pytest.param(name, gpu, release, marks=() if is_default else pytest.mark.long)
            )
    return found


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
def test_shipped_files_for_their_gpu_have_only_notes(
    name: str, gpu: str, release: str, llama: str
) -> None:
    check(config(name, gpu, release, llama if name.startswith("llama") else name.partition("/")[0]))


@each_case("name", LOADS)
def test_shipped_files_for_their_load_have_only_notes(name: str) -> None:
    isl, osl, concurrency = LOADS[name]
    gpu = SHIPPED[name][0][0]
    chosen = config(name, gpu, claimed(next((FOLDER / name).glob("*.yaml")))[-1], "gpt-oss-120b")
    check(chosen.model_copy(update={"isl": isl, "osl": osl, "concurrency": concurrency}))


def test_shipped_files_of_tensorrt_llm_are_all_checked() -> None:
    folders = {path.parent.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.yaml")}
    assert {name for name in folders if not name.startswith(("tiny-gpt-oss", "vllm"))} == set(
        SHIPPED
    )
