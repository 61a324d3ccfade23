"""Name all fuzz targets, and load one. A process imports only the module of its own target."""

from __future__ import annotations

import importlib
from typing import Final

from tests.fuzz.target import Target

MODULES: Final = {
    "frames": "messages",
    "calls": "messages",
    "records": "messages",
    "signed-params": "transfer_params",
    "engine-state": "transfer_params",
    "kv-requests": "kv_connections",
    "kv-replies": "kv_connections",
    "harmony": "output_parsers",
    "template-output": "output_parsers",
    "chat": "request_bodies",
    "completions": "request_bodies",
    "responses": "request_bodies",
    "messages": "request_bodies",
    "tokenize": "request_bodies",
    "formats": "formats",
    "text-cache": "formats",
    "yaml": "configuration",
    "deployment": "configuration",
    "engine-arguments": "configuration",
    "command-line": "configuration",
    "api-keys": "key_files",
    "transfer-keys": "key_files",
    "connection": "http",
    "frontend": "http",
}


def load(name: str) -> Target:
    """Import and return a target."""
    module = importlib.import_module(f"tests.fuzz.targets.{MODULES[name]}")
    target: Target = module.TARGETS[name]
    return target
