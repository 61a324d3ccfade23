"""Show the engine arguments of a worker, and the environment of the engine's ranks.

`--print-config`, `--dump-config-to` and `--print-environment` use this.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo_trtllm.config import layers
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.config.text_table import format_table
from dynamo_trtllm.engines.arguments import DescribedArguments, NoArguments, described_arguments
from dynamo_trtllm.engines.factory import find_engine
from dynamo_trtllm.protocol.errors import ConfigError

log = logging.getLogger(__name__)

_MAX_SHOWN = 8  # items of a list in the table of arguments


def describe_arguments(config: WorkerConfig) -> DescribedArguments:
    """Return the engine arguments of a worker. The engine's library need not be installed.

    Raises:
        ConfigError: an argument is invalid; the error names the flag, file or key.
    """
    match config.engine:
        case "torch":
            from dynamo_trtllm.engines.torch.args import TorchArgs

            return described_arguments(config, TorchArgs, "torch")
        case "vllm":
            from dynamo_trtllm.engines.vllm import args as vllm_args

            return vllm_args.described(config)
        case "mock":
            from dynamo_trtllm.engines.mock.args import MockArgs

            return described_arguments(config, MockArgs, "mock")
        case None | "trtllm":
            return _trtllm(config)
        case name:
            schema = find_engine(config).traits.arguments or NoArguments
            return described_arguments(config, schema, name)


def argument_table(config: WorkerConfig) -> str:
    """Return a table of all engine arguments with value and source, followed by notes."""
    arguments = describe_arguments(config)
    rows = [(key, _shown(leaf.value), leaf.source) for key, leaf in arguments.every.items()]
    heading = f"\narguments of {arguments.title}\n"
    body = format_table([("argument", "value", "source"), *rows])
    notes = "".join(f"note: {note}\n" for note in arguments.notes)
    return heading + body + notes


def dump_arguments(config: WorkerConfig, path: Path) -> None:
    """Write the arguments that were set as a YAML file for `--extra-engine-args`. A comment at each
    argument names its source.

    Raises:
        ConfigError: an argument is invalid, or the file can't be written.
    """
    arguments = describe_arguments(config)
    text = f"# {arguments.title}\n{layers.as_yaml(arguments.given)}"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(
            f"--dump-config-to {path} can't be written: {exc.strerror or exc}; pass another path",
            field="dump_config_to",
        ) from exc


def _trtllm(config: WorkerConfig) -> DescribedArguments:
    from dynamo_trtllm.engines.trtllm import args
    from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY, release_for
    from dynamo_trtllm.engines.trtllm.bindings import PACKAGE

    if PACKAGE.is_installed():
        return args.described(config, release_for(PACKAGE.version()))
    arguments = args.described(config, LIBRARY.newest)
    return arguments._replace(
        title=f"{arguments.title} (the newest known; TensorRT-LLM is not installed)"
    )


def shell_exports(config: WorkerConfig, environment: Mapping[str, str]) -> str:
    """Return lines with which a shell exports the environment of the ranks of an engine on several
    nodes, before the ranks start.

    Args:
        config: settings of the worker.
        environment: the environment of this process. A variable that is set here keeps its value.

    Raises:
        ConfigError: the engine is not trtllm, or the kernel profile can't be chosen.
    """
    from dynamo_trtllm.engines.trtllm.kernel_profiles import rank_environment

    if config.engine not in (None, "trtllm"):
        raise ConfigError(
            "--print-environment is for engines on several nodes, which only trtllm has, not"
            f" {config.engine}; leave it out",
            field="print_environment",
        )
    profile, variables = rank_environment(config)
    if config.kernels_profile is None and not profile.sm:
        text = (
            "no kernel profile is for the GPUs of this host, or none is visible: using %s; see"
            " --kernels-profile"
        )
        log.warning(text, profile.name)
    lines = [f"# kernel profile {profile.name}"]
    for name, value in variables.items():
        lines.append(f"export {name}={shlex.quote(environment.get(name, value))}")
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) > _MAX_SHOWN:
        # A long list would make the column of all values as wide. `--dump-config-to` writes it all.
        first = ", ".join(map(json.dumps, value[:3]))
        return f"[{first}, ... {json.dumps(value[-1])}] ({len(value)} values)"
    return json.dumps(value)
