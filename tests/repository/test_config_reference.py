"""The configuration reference is what the models say, and says all of it."""

import pkgutil
from importlib import import_module

import pytest

from dynamo_trtllm import config
from dynamo_trtllm.config.client_commands import DeploymentChoiceConfig
from dynamo_trtllm.config.config_base import Config, ConnectionConfig, ProcessConfig
from dynamo_trtllm.config.deployment import Section
from dynamo_trtllm.config.flags import flags_of
from dynamo_trtllm.config.http_access import (
    FrontendAccessConfig,
    HttpAccessConfig,
    HttpClientConfig,
)
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.config.routing import RoutingConfig
from dynamo_trtllm.config.simulation import LimitsConfig
from scripts import config_reference
from scripts.config_reference import PAGE, PROGRAMS


def models(of: type[Config]) -> set[type[Config]]:
    return {of} | {model for sub in of.__subclasses__() for model in models(sub)}


def test_page_when_written_again_then_as_committed() -> None:
    assert config_reference.page() == PAGE.read_text(encoding="utf-8"), "run scripts/docs"


def test_page_when_models_are_counted_then_none_is_left_out() -> None:
    for module in pkgutil.iter_modules(config.__path__):
        import_module(f"dynamo_trtllm.config.{module.name}")
    described = {program.model for program in PROGRAMS} | {
        table.model for table in config_reference.DEPLOYMENT
    }
    # a process that another one starts takes what its parent takes
    inner = {model for model in models(FrontendConfig) if model is not FrontendConfig}
    here = {
        model for model in models(Config) if model.__module__.startswith("dynamo_trtllm.config.")
    }
    assert (
        here
        - {
            Config,
            ConnectionConfig,
            DeploymentChoiceConfig,
            ProcessConfig,
            HttpAccessConfig,
            HttpClientConfig,
            FrontendAccessConfig,
            RoutingConfig,
            LimitsConfig,
            Section,
        }
        - inner
        == described
    )


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.title)
def test_page_has_a_row_for_every_flag(program) -> None:
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {program.title}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) == len(program.model.model_fields)
    for flag in flags_of(program.model):
        (row,) = [row for row in rows if f"`DYN_TRTLLM_{flag.field.upper()}`" in row]
        assert all(f"`{name}`" in row for name in (*flag.names, *flag.choices))
        assert all(f"`{name}`" in row for name in flag.env)
