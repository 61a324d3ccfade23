"""Engines of other packages: how they are found, and what is wrong with those that can't serve."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel

from dynamo_trtllm.cli import version
from dynamo_trtllm.cli.completion import completion
from dynamo_trtllm.config.engine_names import ENTRY_POINTS, EngineTraits
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.capabilities import ChecksHealth, Sleeps
from dynamo_trtllm.engines.engine_interface import Engine, EngineInfo, EngineStats
from dynamo_trtllm.engines.factory import check_settings, create_engine, engine_kind
from dynamo_trtllm.engines.method_checks import check_engine_class
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.worker.health import Health
from dynamo_trtllm.worker.show_arguments import argument_table
from dynamo_trtllm.worker.startup import start_engine
from dynamo_trtllm.worker.worker import Worker
from tests.kit.cases import each_case


class FiveMethods:
    """An engine that does nothing."""

    def __init__(self, config: WorkerConfig, *, instance_id: int) -> None:
        self.config = config

    async def start(self) -> EngineInfo:
        return None  # type: ignore[return-value]

    def generate(self, request: Any, on_event: Any) -> Any: ...

    async def drain(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats()

    async def aclose(self) -> None: ...


class Arguments(BaseModel):
    beams: int = 1


class WithArguments(FiveMethods):
    traits: ClassVar = EngineTraits(arguments=Arguments)


class Packages:
    """Installed packages that provide engines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def install(self, package: str, engine: str, target: str) -> None:
        info = self._folder / f"{package}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{engine} = {target}\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return Packages(tmp_path)


def config_of(**settings: Any) -> WorkerConfig:
    return WorkerConfig(model_path="m", **settings)


def test_engine_of_another_package_is_created_by_its_name(packages: Packages) -> None:
    packages.install("acme", "five", f"{__name__}:FiveMethods")
    engine = create_engine(config_of(engine="five"), instance_id=1)
    assert isinstance(engine, FiveMethods)
    assert version.versions()["engines"]["five"] == "acme 1.2"
    assert "trtllm vllm torch mock five" in completion("bash")


@pytest.mark.parametrize(
    ("config", "instance_id", "problem"),
    [
        (None, 1, "config is None; pass a WorkerConfig"),
        ({"engine": "mock"}, 1, "config is .*; pass a WorkerConfig"),
        (config_of(engine="mock"), "1", "instance_id is '1'; pass a number"),
        (config_of(engine="mock"), None, "instance_id is None; pass a number"),
    ],
)
def test_engine_of_wrong_arguments_says_what_to_pass(
    config: Any, instance_id: Any, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        create_engine(config, instance_id=instance_id)


def test_unknown_engine_lists_built_in_and_installed_ones(packages: Packages) -> None:
    packages.install("acme", "five", f"{__name__}:FiveMethods")
    with pytest.raises(ConfigError) as caught:
        config_of(engine="fife")
    assert (
        "there is no engine 'fife'; did you mean five? built in: trtllm, vllm, torch, mock"
        in caught.value.message
    )
    assert "installed: five of acme 1.2" in caught.value.message


@pytest.mark.parametrize("name", ["five", "mock"])
def test_engine_name_of_two_packages_is_an_error_that_names_both(
    packages: Packages, name: str
) -> None:
    packages.install("acme", name, f"{__name__}:FiveMethods")
    problem = "acme 1.2 claims the name of the built-in engine mock"
    if name == "five":
        packages.install("beta", name, f"{__name__}:FiveMethods")
        problem = "the engine name five is ambiguous: acme 1.2 and beta 1.2"
    with pytest.raises(ConfigError, match=problem):
        create_engine(config_of(engine=name), instance_id=1)


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("no_such_module:Engine", "ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{__name__}:NoSuchClass", "AttributeError: .*'NoSuchClass'"),
        ("exits_when_imported:Engine", "SystemExit: no GPU"),
    ],
)
def test_engine_that_fails_to_import_names_package_and_cause(
    packages: Packages, tmp_path: Path, target: str, cause: str
) -> None:
    (tmp_path / "exits_when_imported.py").write_text("raise SystemExit('no GPU')")
    packages.install("acme", "five", target)
    with pytest.raises(ConfigError, match=f"five of acme 1.2 can't be imported from .*{cause}"):
        create_engine(config_of(engine="five"), instance_id=1)


class PlainStart(FiveMethods):
    def start(self) -> None: ...  # type: ignore[override]


class AsyncGenerate(FiveMethods):
    async def generate(self, request: Any, on_event: Any) -> Any: ...


class GeneratorGenerate(FiveMethods):
    async def generate(self, request: Any, on_event: Any) -> Any:
        yield 1


class PlainGeneratorGenerate(FiveMethods):
    def generate(self, request: Any, on_event: Any) -> Any:
        yield 1


class GenerateWithoutEvents(FiveMethods):
    def generate(self, request: Any) -> Any: ...  # type: ignore[override]


class DrainWithLimit(FiveMethods):
    async def drain(self, limit_s: float) -> None: ...  # type: ignore[override]


class StatsAsValue(FiveMethods):
    stats = 5  # type: ignore[assignment]


class WithoutDrain:
    start = FiveMethods.start
    generate = FiveMethods.generate
    stats = FiveMethods.stats
    aclose = FiveMethods.aclose


class InheritsOnly(Engine):
    async def start(self) -> EngineInfo: ...


class PlainCheck(FiveMethods, ChecksHealth):
    def check(self) -> None: ...  # type: ignore[override]


class ObstacleAsMethod(FiveMethods, Sleeps):
    def sleep_obstacle(self) -> str:  # type: ignore[override]
        return ""

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


@each_case(
    ("engine_class", "problem"),
    [
        (WithoutDrain, "has no drain; see Engine.drain"),
        (InheritsOnly, "has no generate"),
        (PlainStart, "has start as a plain method, not as `async def start`"),
        (AsyncGenerate, "has `async def generate`, not a plain method"),
        (GeneratorGenerate, "has `async def generate`, not a plain method"),
        (PlainGeneratorGenerate, "has generate as a generator, with `yield`"),
        (GenerateWithoutEvents, r"can't be called as generate\(request, on_event\): too many"),
        (DrainWithLimit, r"has drain, which can't be called as drain\(\): missing .*limit_s"),
        (StatsAsValue, "has stats, which is no method"),
        (PlainCheck, "has check as a plain method.*see ChecksHealth.check"),
        (ObstacleAsMethod, "has sleep_obstacle as a method, not as a property"),
    ],
)
def test_engine_with_a_wrong_method_is_rejected_by_name(engine_class: type, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"{engine_class.__name__} .*{problem}"):
        check_engine_class(engine_class)


def test_engine_is_checked_before_it_is_created(packages: Packages) -> None:
    packages.install("acme", "five", f"{__name__}:GenerateWithoutEvents")
    with pytest.raises(ConfigError, match="GenerateWithoutEvents has generate, which can't be"):
        create_engine(config_of(engine="five"), instance_id=1)


def test_partial_has_the_name_and_the_traits_of_its_class() -> None:
    kind = engine_kind(partial(WithArguments))
    assert (kind.name, kind.traits.arguments) == ("WithArguments", Arguments)


def test_function_that_returns_no_engine_is_an_error() -> None:
    def create(config: WorkerConfig, *, instance_id: int) -> Any:
        return None

    with pytest.raises(ConfigError, match="NoneType has no start"):
        engine_kind(create).create(config_of(), instance_id=1)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"max_batch_size": 4}, "--max-batch-size: the FiveMethods engine has no such setting"),
        ({"override_engine_args": {"beams": 2}}, "--override-engine-args: unknown key 'beams'"),
        ({"kv_transfer_host": "10.0.0.1"}, "--kv-transfer-host 10.0.0.1 has no effect on"),
        ({"kv_transfer_bind_host": "::"}, "--kv-transfer-bind-host :: has no effect on"),
    ],
)
def test_setting_that_an_engine_does_not_read_is_rejected(
    settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_settings(config_of(**settings), engine_kind(FiveMethods))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"disaggregation_mode": "prefill"}, "can't run a prefill worker.*TransfersKv"),
        ({"publish_kv_events": True}, "publishes none.*PublishesKvEvents"),
    ],
)
def test_setting_that_needs_a_capability_names_it(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        engine_kind(FiveMethods).create(config_of(**settings), instance_id=1)


def test_arguments_of_another_package_are_printed(packages: Packages) -> None:
    packages.install("acme", "args", f"{__name__}:WithArguments")
    text = argument_table(config_of(engine="args", override_engine_args={"beams": 3}))
    assert "arguments of the args engine" in text
    assert "beams" in text


@pytest.mark.parametrize(
    ("engine", "settings", "problem"),
    [
        (FiveMethods, {"engine": "mock"}, "two engines: --engine mock, and"),
        (FiveMethods(config_of(), instance_id=1), {}, "pass a class or function"),
        (lambda config: None, {}, "pass a class or function that is called with"),
    ],
    ids=["two", "object", "signature"],
)
def test_worker_with_a_wrong_engine_says_what_to_pass(
    engine: Any, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        Worker(config_of(**settings), engine=engine)


async def test_start_that_returns_no_info_is_an_error() -> None:
    engine = FiveMethods(config_of(), instance_id=1)
    with pytest.raises(ConfigError, match=r"FiveMethods\.start returned None; it must return an"):
        await start_engine(engine, Health(instance_id="1"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("renderer", "plain"),
        ("context_length", 0),
        ("vocab_size", 0),
        ("unsupported_features", ("logprob",)),
        ("supported_features", ("priorities",)),
    ],
)
def test_info_with_an_invalid_value_names_the_field(field: str, value: Any) -> None:
    values: dict[str, Any] = {
        "engine": "five",
        "context_length": 8,
        "vocab_size": 8,
        "eos_token_ids": (),
        "renderer": "harmony",
    }
    with pytest.raises(ConfigError, match=f"EngineInfo.{field} has") as caught:
        EngineInfo(**values | {field: value})
    assert caught.value.field == field
