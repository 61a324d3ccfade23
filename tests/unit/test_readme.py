"""What Quickstart, "Serve a model", the example of embedding and the shipped files promise: lines
and files that are accepted.
"""

import re
import shlex
import types
from pathlib import Path

import pytest

import dynamo_trtllm
from dynamo_trtllm.config.commands import (
    ChatConfig,
    ClearNamespaceConfig,
    LaunchConfig,
    PreflightConfig,
)
from dynamo_trtllm.config.deployment import load_deployment
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.engines.arguments import engine_arguments
from dynamo_trtllm.engines.mock.args import MockArgs
from dynamo_trtllm.engines.torch.args import TorchArgs
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY
from dynamo_trtllm.engines.trtllm.args import trtllm_args
from scripts.config_reference import PROGRAMS
from tests.kit.cases import each_case

ROOT = Path(__file__).parents[2]
START = "".join(
    (ROOT / "docs" / page).read_text(encoding="utf-8")
    for page in ("getting-started.md", "serve-a-model.md")
)
EMBEDDING = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
CONFIGS = {
    name: program.model for program in PROGRAMS for name in (program.module, program.command)
}
# module or subcommand, and flags; tests/repository/test_page_commands.py knows those of bench
TYPED = r"(?:python -m (?=dynamo_trtllm)|dynamo-trtllm (?!bench))(\w[\w.-]*) ([^`\n&#]*)"
LINES = sorted(
    {line for line in re.findall(TYPED, START.replace("\\\n", " ")) if "--help" not in line[1]}
)
FLAGS = {"mock": MockArgs, "torch": TorchArgs}


def test_first_pages_have_a_line_per_process() -> None:
    started = {CONFIGS[name] for name, _ in LINES}
    assert started >= {
        WorkerConfig,
        FrontendConfig,
        LaunchConfig,
        ChatConfig,
        PreflightConfig,
        ClearNamespaceConfig,
    }


@each_case(("module", "words"), LINES)
def test_launch_line_when_typed_then_it_is_accepted(module: str, words: str) -> None:
    loaded = load(CONFIGS[module], prog="x", argv=shlex.split(words), environ={})
    if isinstance(loaded, WorkerConfig) and loaded.engine is None:
        assert trtllm_args(loaded, LIBRARY.newest).get("tensor_parallel_size") == 4
    elif isinstance(loaded, WorkerConfig):
        assert engine_arguments(loaded, FLAGS[loaded.engine], loaded.engine)


def test_public_names_are_exactly_the_documented() -> None:
    section = EMBEDDING.split("## Public names\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    stub = (ROOT / "dynamo_trtllm" / "__init__.pyi").read_text(encoding="utf-8")
    typed = set(re.findall(r'^    "(\w+)",$', stub, re.MULTILINE))
    assert documented == set(dir(dynamo_trtllm)) == set(dynamo_trtllm.__all__) == typed
    for name in documented:
        value = getattr(dynamo_trtllm, name)
        # A type alias has no docstring.
        assert value.__doc__ or isinstance(value, types.GenericAlias), name


@each_case("path", sorted((ROOT / "deploy/local").glob("*.yaml")))
def test_deployment_when_shipped_then_it_loads(path: Path) -> None:
    assert load_deployment(path).workers


@pytest.mark.parametrize(
    "path", sorted((ROOT / "engine_configs/tiny-gpt-oss").glob("*.yaml")), ids=str
)
def test_engine_config_when_of_the_torch_engine_then_it_takes_it(path: Path) -> None:
    config = WorkerConfig(model_path="m", engine="torch", extra_engine_args=path)
    assert engine_arguments(config, TorchArgs, "torch").kv_cache_gib == 0.5
