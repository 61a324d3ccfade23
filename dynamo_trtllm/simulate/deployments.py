"""Turn the content of a deployment file into a deployment to be simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dynamo_trtllm.config.child_settings import to_argv
from dynamo_trtllm.config.deployment import DeploymentConfig, WorkerSpec
from dynamo_trtllm.config.layers import find_file, read_yaml
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.config.planner import PlannerConfig
from dynamo_trtllm.engines.arguments import ENGINE_FLAGS
from dynamo_trtllm.launch.process_specs import planner_flags, slo_limits
from dynamo_trtllm.planner.predict import TimeLimits
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.simulate.cluster import SimulatedDeployment
from dynamo_trtllm.simulate.constants import Constants, find_constants

_MOCK: Final = "mock"
# For arguments of vLLM and TensorRT-LLM, the argument of the mock engine with the same meaning.
_MOCK_ARGUMENTS: Final[Mapping[str, str]] = {
    "block_size": "kv_block_size",
    "max_num_batched_tokens": "prefill_tokens_per_step",
    "max_num_seqs": "max_batch_size",
    "max_model_len": "max_seq_len",
    "max_num_tokens": "prefill_tokens_per_step",
    "max_batch_size": "max_batch_size",
    "max_seq_len": "max_seq_len",
    "enable_prefix_caching": "enable_prefix_caching",
}
# TensorRT-LLM has its setting of the prefix cache in a section.
_SECTION: Final = "kv_cache_config"
_MOCK_ARGUMENTS_OF_SECTION: Final[Mapping[str, str]] = {
    "enable_block_reuse": "enable_prefix_caching",
}
# For flags of a worker, the argument of the mock engine with the same meaning.
_MOCK_ARGUMENTS_OF_FLAGS: Final[Mapping[str, str]] = {
    "kv_block_size": "kv_block_size",
    "max_num_tokens": "prefill_tokens_per_step",
    "max_batch_size": "max_batch_size",
    "max_seq_len": "max_seq_len",
}


def simulated_deployment(
    deployment: DeploymentConfig,
    known: Sequence[Constants],
    gpu: str | None,
    frontend_s: float | None = None,
) -> SimulatedDeployment:
    """Return a deployment to be simulated, with the planner that `launch` would start.

    Args:
        deployment: the content of the deployment file.
        known: constants of engines other than mock.
        gpu: the GPU model of the workers with these engines.
        frontend_s: the time that a request takes outside of engines. None: the time in the
            constants.

    Raises:
        ConfigError: the deployment has no frontend, there are no constants for it, or a setting is
            wrong.
    """
    if deployment.frontend is None:
        raise ConfigError("the deployment has no frontend, which the simulation needs")
    common = {"namespace": deployment.namespace}
    workers: list[WorkerConfig] = []
    num_gpus = 0
    constants_frontend_s = 0.0
    for spec in deployment.workers:
        config = _configured(WorkerConfig, _worker_flags(spec, common))
        if config.engine != _MOCK:
            # The constants are found by the name of the model. A folder may have any name, so the
            # name that clients send is used if there is one.
            model = config.served_model_name or config.model_path
            size = _gpus_per_worker(spec, config)
            constants = find_constants(known, model, str(config.engine), gpu, gpus_per_worker=size)
            config = as_mock(config, constants)
            constants_frontend_s = max(constants_frontend_s, constants.frontend_ms / 1000)
        workers += [config] * spec.count
        # A worker without GPUs counts as one, so that figures per GPU exist.
        num_gpus += spec.count if spec.devices == "cpu" else len(spec.devices)
    names = {config.model_name for config in workers}
    if len(names) > 1:
        raise ConfigError(
            f"the workers serve several models ({', '.join(sorted(names))}); simulate a deployment"
            " of one model"
        )
    frontend = _configured(FrontendConfig, common | deployment.frontend)
    return SimulatedDeployment(
        frontend=frontend,
        workers=workers,
        num_gpus=num_gpus,
        frontend_s=constants_frontend_s if frontend_s is None else frontend_s,
        planner=_planner_limits(deployment, frontend),
    )


def _planner_limits(deployment: DeploymentConfig, frontend: FrontendConfig) -> TimeLimits | None:
    """Return the limits of the planner that `launch` would start.

    None: it would start none, or one that only advises. Then shares do not change.
    """
    flags = planner_flags(deployment, slo_limits(frontend.model_dump()))
    if flags is None:
        return None
    planner = _configured(PlannerConfig, flags)
    if planner.advise:
        return None
    return TimeLimits(planner.slo_ttft_ms / 1000, planner.slo_itl_ms / 1000)


def as_mock(config: WorkerConfig, constants: Constants) -> WorkerConfig:
    """Return the settings of a mock worker that takes the time of another engine.

    The arguments of the other engine that set limits also hold for the mock engine.
    """
    # By default, all engines except mock reuse the KV of prefixes.
    arguments: dict[str, Any] = {"enable_prefix_caching": True, **constants.mock}
    # Later sources override earlier ones, as in a worker.
    if config.extra_engine_args is not None:
        arguments |= _of_engine(read_yaml(find_file(config.extra_engine_args)))
    flags = {flag: getattr(config, flag) for flag in _MOCK_ARGUMENTS_OF_FLAGS}
    arguments |= _translated(flags, _MOCK_ARGUMENTS_OF_FLAGS)
    arguments |= _of_engine(config.override_engine_args or {})
    _rescale_blocks(arguments, constants)
    return config.model_copy(
        update={
            "engine": _MOCK,
            "served_model_name": config.model_name,
            "extra_engine_args": None,
            "override_engine_args": arguments,
            **dict.fromkeys(ENGINE_FLAGS),
        }
    )


def _of_engine(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of vLLM or TensorRT-LLM by the names of the mock engine's arguments."""
    section = given.get(_SECTION)
    in_section = section if isinstance(section, Mapping) else {}
    return _translated(given, _MOCK_ARGUMENTS) | _translated(in_section, _MOCK_ARGUMENTS_OF_SECTION)


def _translated(given: Mapping[str, Any], mock_names: Mapping[str, str]) -> dict[str, Any]:
    """Return the given values by the names of the mock engine's arguments."""
    return {
        mock_name: given[name]
        for name, mock_name in mock_names.items()
        if given.get(name) is not None
    }


def _rescale_blocks(arguments: dict[str, Any], constants: Constants) -> None:
    """If blocks have another size than in the constants, keep the number of tokens of the pool."""
    old_size = constants.mock.get("kv_block_size")
    num_blocks = constants.mock.get("kv_cache_blocks")
    new_size = arguments.get("kv_block_size")
    # A size that is not a positive number is left as it is, because the mock engine rejects it.
    if old_size and num_blocks and isinstance(new_size, int) and new_size > 0:
        num_tokens = num_blocks * old_size
        if new_size > num_tokens:
            raise ConfigError(
                f"KV blocks of {new_size} tokens are larger than the KV cache of {num_tokens}"
                " tokens; choose smaller ones, such as --kv-block-size 32",
                field="kv_block_size",
            )
        arguments["kv_cache_blocks"] = num_tokens // new_size


def _worker_flags(spec: WorkerSpec, common: Mapping[str, Any]) -> dict[str, Any]:
    return {**common, **spec.flags, "disaggregation_mode": spec.disaggregation_mode}


def _gpus_per_worker(spec: WorkerSpec, config: WorkerConfig) -> int:
    if spec.devices == "cpu":
        return config.tensor_parallel_size or 1
    return len(spec.devices) // spec.count


def _configured(model: Any, flags: Mapping[str, Any]) -> Any:
    """Return the settings of a process of the deployment. Environment variables are ignored."""
    return load(model, prog="simulate", argv=to_argv(model, flags), environ={})
