"""Disaggregated serving of large language models: prefill and decode run in separate workers.

`docs/embedding.md` describes the public names. Importing the package imports none of them: each is
imported when it is first used.
"""

from importlib import import_module

__version__ = "0.1.0"

# Public names, by the module that has them. `__init__.pyi` has their types.
_MODULES = {
    "Chunk": "protocol.messages",
    "ConfigError": "protocol.errors",
    "DynamoError": "protocol.errors",
    "EmbeddedDeployment": "launch.embedded",
    "Engine": "engines.engine_interface",
    "EngineInfo": "engines.engine_interface",
    "Frontend": "frontend.process.frontend",
    "FrontendConfig": "config.models",
    "FrontendRequest": "frontend.http.hooks",
    "FrontendResponse": "frontend.http.hooks",
    "GenerateRequest": "protocol.messages",
    "Phase": "protocol.messages",
    "Refusal": "frontend.http.hooks",
    "Role": "protocol.messages",
    "Sampling": "protocol.messages",
    "Worker": "worker.worker",
    "WorkerConfig": "config.models",
    "as_stream": "protocol.streams",
    "create_engine": "engines.factory",
    "serve": "launch.embedded",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
