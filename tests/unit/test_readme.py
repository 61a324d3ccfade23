"""What the README and the shipped files promise: launch lines that parse, links that lead somewhere, valid YAML."""

import re
import shlex
from pathlib import Path

import pytest

from dynamo_trtllm.config.base import Config
from dynamo_trtllm.config.commands import ChatConfig, ClearNamespaceConfig, LaunchConfig, PreflightConfig
from dynamo_trtllm.config.deployment import load_deployment
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.engines.arguments import engine_arguments
from dynamo_trtllm.engines.mock.args import MockArgs
from dynamo_trtllm.engines.torch.args import TorchArgs
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY
from dynamo_trtllm.engines.trtllm.args import trtllm_args

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CONFIGS: dict[str, type[Config]] = {
    "dynamo_trtllm.chat": ChatConfig,
    "dynamo_trtllm.clear_namespace": ClearNamespaceConfig,
    "dynamo_trtllm.preflight": PreflightConfig,
    "dynamo_trtllm": WorkerConfig,
    "dynamo_trtllm.frontend": FrontendConfig,
    "dynamo_trtllm.launch": LaunchConfig,
}
LINES = sorted(set(re.findall(r"python -m (dynamo_trtllm\S*) ([^`\n&]*)", README)))
FLAGS = {"mock": MockArgs, "torch": TorchArgs}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_readme_when_read_then_it_has_launch_lines_of_each_process() -> None:
    assert {module for module, _ in LINES} == set(CONFIGS)


@pytest.mark.parametrize(("module", "words"), LINES)
def test_launch_line_when_typed_then_it_is_accepted(module: str, words: str) -> None:
    loaded = load(CONFIGS[module], prog="x", description="x", argv=shlex.split(words), environ={})
    if isinstance(loaded, WorkerConfig) and loaded.engine is None:
        assert trtllm_args(loaded, LIBRARY.newest).get("tensor_parallel_size") == 4
    elif isinstance(loaded, WorkerConfig):
        assert engine_arguments(loaded, FLAGS[loaded.engine], loaded.engine)


def test_scripts_when_named_then_they_are_there_and_executable() -> None:
    named = set(re.findall(r"\./(scripts/\w+)", README))
    assert named == {"scripts/demo", "scripts/test"}
    assert all((ROOT / name).stat().st_mode & 0o111 for name in named)


def test_links_when_relative_then_they_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_embedding_example_when_run_up_to_its_worker_then_it_is_valid() -> None:
    (example,) = blocks("python")
    assert ".run()" in example
    exec(example.replace(".run()", "").replace('"__main__"', "__name__"), {"__name__": "example"})


@pytest.mark.parametrize("path", sorted((ROOT / "deploy/local").glob("*.yaml")), ids=str)
def test_deployment_when_shipped_then_it_loads(path: Path) -> None:
    assert load_deployment(path).workers


@pytest.mark.parametrize("path", sorted((ROOT / "engine_configs/tiny-gpt-oss").glob("*.yaml")), ids=str)
def test_engine_config_when_of_the_torch_engine_then_it_takes_it(path: Path) -> None:
    config = WorkerConfig(model_path="m", engine="torch", extra_engine_args=path)
    assert engine_arguments(config, TorchArgs, "torch").kv_cache_gib == 0.5
