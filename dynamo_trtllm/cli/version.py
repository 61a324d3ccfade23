"""Show the version of this package, and which engines, GPUs, libraries and servers are found
(`dynamo-trtllm version`).

If a library that this package uses breaks a requirement of an installed engine, it is shown with
this requirement. The command imports no engine and no library: it reads package metadata, and runs
`nvidia-smi`, `etcd` and `nats-server` for a moment.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from dynamo_trtllm import __version__
from dynamo_trtllm.config.commands import VersionConfig
from dynamo_trtllm.config.engine_names import engine_entry_points, package_of
from dynamo_trtllm.config.load import command
from dynamo_trtllm.config.parser import COMMAND_NAME
from dynamo_trtllm.config.text_table import format_table
from dynamo_trtllm.launch.local_servers import etcd_binary, nats_binary
from dynamo_trtllm.protocol.errors import ConfigError

_PROGRAM_TIMEOUT_S = 5.0
_GPU_FIELDS = ("index", "name", "memory.total", "driver_version")
_NIXL = ("nixl-cu13", "nixl-cu12", "nixl")  # the first two contain UCX
# For each engine, its module and the packages that it needs. The version of the first package is
# shown as that of the engine.
_ENGINES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "trtllm": ("tensorrt_llm", ("tensorrt-llm",)),
    "vllm": ("vllm", ("vllm",)),
    "torch": ("torch", ("torch", "transformers", "safetensors", "llguidance")),
}
# Packages that this package imports, and TensorRT-LLM or vLLM, too.
_SHARED = (
    "huggingface-hub",
    "jinja2",
    "llguidance",
    "msgspec",
    "numpy",
    "nvidia-ml-py",
    "openai-harmony",
    "oss-harmony",  # a fork with the same files: whichever was installed last is imported
    "prometheus-client",
    "protobuf",
    "pydantic",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "uvloop",
    "xxhash",
)
_PINNING = ("tensorrt-llm", "vllm")  # engines that require certain releases of shared packages
_UNKNOWN = "unknown version"


@command(VersionConfig, f"{COMMAND_NAME} version")
def main(config: VersionConfig) -> None:
    """Run the command. Exit with status 0, or 2 for a bad command line."""
    found = versions()
    if config.json_output:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        sys.stdout.write(format_table(list(_rows(found))))


def versions() -> dict[str, Any]:
    """Return what is found, for JSON. A value is None if nothing was found."""
    engines = {name: _engine(module, packages) for name, (module, packages) in _ENGINES.items()}
    engines["mock"] = __version__
    for entry in engine_entry_points():
        engines[entry.name] = package_of(entry)
    nixl_versions = [_package(name) for name in _NIXL]
    return {
        "dynamo_trtllm": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "engines": engines,
        "packages": {name: _package(name) for name in _SHARED},
        "broken_pins": [pin for engine in _PINNING for pin in _broken_pins(engine)],
        "nixl": next(filter(None, nixl_versions), None),
        "ucx": _ucx(),
        "etcd": _server(etcd_binary),
        "nats_server": _server(nats_binary),
        "gpus": _gpus(),
    }


def _engine(module: str, packages: Sequence[str]) -> str | None:
    """Return the version of an engine's library, with the packages that are missing beside it."""
    first, *others = packages
    version = _package(first)
    if not version:
        # A module without package metadata: it was not installed from a wheel.
        version = _UNKNOWN if importlib.util.find_spec(module) else None
    missing = [name for name in others if _package(name) is None]
    if version is None or not missing:
        return version
    return f"{version} (without {', '.join(missing)})"


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _broken_pins(engine: str) -> Iterator[dict[str, str]]:
    """Yield the requirements of an installed engine that a shared package does not meet."""
    release = _package(engine)
    if release is None:
        return
    for text in importlib.metadata.requires(engine) or ():
        try:
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            found = _package(name) if name in _SHARED else None
            if found is None:
                continue
            is_met = requirement.specifier.contains(Version(found), prereleases=True)
        except (InvalidRequirement, InvalidVersion):
            continue  # there is nothing to compare
        # A requirement of an extra, or of another platform, does not apply.
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and not is_met:
            yield {
                "package": name,
                "version": found,
                "engine": f"{engine} {release}",
                "requires": str(requirement.specifier),
            }


def _ucx() -> str | None:
    """Return the package that contains UCX, on which NIXL transfers KV."""
    for name in _NIXL:
        version = _package(name)
        if not version:
            continue
        files = importlib.metadata.files(name) or ()
        if any("libucp" in str(path) for path in files):
            return f"in {name} {version}"
    return None


def _server(find: Callable[[], str]) -> dict[str, str] | None:
    try:
        path = find()
    except ConfigError:
        return None
    # etcd prints "etcd Version: 3.6.1" and more lines, and nats-server "nats-server: v2.12.0".
    first_line, _, _ = _output(path, "--version").partition("\n")
    _, _, version = first_line.rpartition(" ")
    return {"version": version.removeprefix("v") or _UNKNOWN, "path": path}


def _gpus() -> list[dict[str, str]]:
    query = f"--query-gpu={','.join(_GPU_FIELDS)}"
    gpus = []
    for line in _output("nvidia-smi", query, "--format=csv,noheader").splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        # A line without all fields is a message.
        if len(cells) == len(_GPU_FIELDS):
            gpus.append(dict(zip(_GPU_FIELDS, cells, strict=True)))
    return gpus


def _output(*command: str) -> str:
    """Return what a program prints; empty if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROGRAM_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    missing = "not installed"
    yield "dynamo_trtllm", found["dynamo_trtllm"]
    yield "Python", f"{found['python']} on {found['platform']}"
    for engine, version in found["engines"].items():
        if engine == "mock":
            version = "built in"
        yield f"engine {engine}", version or missing
    for name, version in found["packages"].items():
        if version is None:
            continue
        for pin in found["broken_pins"]:
            if pin["package"] == name:
                version += f" (but {pin['engine']} requires {pin['requires']})"
        yield name, version
    yield "NIXL", found["nixl"] or missing
    yield "UCX", found["ucx"] or missing
    for name, key in (("etcd", "etcd"), ("NATS", "nats_server")):
        server = found[key]
        yield name, f"{server['version']} at {server['path']}" if server else missing
    for gpu in found["gpus"]:
        description = f"{gpu['name']}, {gpu['memory.total']}, driver {gpu['driver_version']}"
        yield f"GPU {gpu['index']}", description
    if not found["gpus"]:
        yield "GPU", "none (nvidia-smi lists none)"
