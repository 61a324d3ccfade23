"""Installs each client from PyPI or npm, in a pinned version, into an environment of its own."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSTALL_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Environment:
    """Packages of one client.

    Args:
        pins: packages with their versions, as `pip install` or `npm install` takes them.
        is_node: installed by npm instead of pip.
        without: packages that the pins require and that are not installed.
    """

    name: str
    pins: tuple[str, ...]
    is_node: bool = False
    without: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Return the folder, whose name changes with the pins: a finished one is used again."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        content = "\n".join([sys.version, *self.pins, *self.without])
        digest = hashlib.sha256(content.encode()).hexdigest()[:8]
        return cache / "dynamo_trtllm" / "clients" / f"{self.name}-{digest}"

    @property
    def programs(self) -> Path:
        """Return the folder of the commands that the packages bring."""
        return self.folder / ("node_modules/.bin" if self.is_node else "bin")

    def interpreter(self, driver: Path) -> str:
        """Return what runs a driver, which for a program of npm may be written in Python."""
        if driver.suffix == ".mjs":
            return "node"
        return sys.executable if self.is_node else str(self.programs / "python")

    def place(self, driver: Path) -> Path:
        """Return where the driver runs. Node looks for packages beside a script: it gets a copy."""
        if driver.suffix != ".mjs":
            return driver
        for module in driver.parent.glob("*.mjs"):
            shutil.copy(module, self.folder)
        return self.folder / driver.name

    def install(self) -> None:
        """Install the packages, unless a previous run has. Idempotent.

        Raises:
            RuntimeError: the installation failed; the text is the end of its output.
        """
        if (self.folder / "complete").exists():
            return
        shutil.rmtree(self.folder, ignore_errors=True)  # of an interrupted run
        self.folder.mkdir(parents=True)
        if self.is_node:
            self._run(
                "npm",
                "install",
                "--no-audit",
                "--no-fund",
                "--prefix",
                str(self.folder),
                *self.pins,
            )
        else:
            self._run(sys.executable, "-m", "venv", "--without-pip", str(self.folder))
            overrides = self.folder / "without.txt"
            conditions = [f"{package}; sys_platform == 'never'\n" for package in self.without]
            overrides.write_text("".join(conditions))
            uv = str(ROOT / "scripts" / "uv")
            self._run(
                uv,
                "pip",
                "install",
                "--quiet",
                "--python",
                str(self.programs / "python"),
                "--overrides",
                str(overrides),
                *self.pins,
            )
        (self.folder / "complete").touch()

    def _run(self, *command: str) -> None:
        # A PYTHONPATH of the tests would shadow the packages of the environment.
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        limits = {"timeout": INSTALL_TIMEOUT_S, "check": False}
        done = subprocess.run(command, env=env, capture_output=True, text=True, **limits)
        if done.returncode != 0:
            output = (done.stdout + done.stderr)[-2000:]
            raise RuntimeError(f"{self.name}: {command[:3]} failed:\n{output}")


def python(name: str, *pins: str) -> Environment:
    return Environment(name, pins)


def node(name: str, *pins: str) -> Environment:
    return replace(Environment(name, pins), is_node=True)


# In the order of the documentation.
ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        python("openai", "openai==3.57.0"),
        node("openai-node", "openai@7.59.0", "zod@4.6.7"),
        node("codex", "@openai/codex@0.171.0"),
        node("claude-code", "@anthropic-ai/claude-code@2.1.197"),
        python("litellm", "litellm==1.110.2"),
        python("litellm-proxy", "litellm[proxy]==1.108.7"),
        python("langchain", "langchain==1.5.2", "langchain-openai==1.7.4", "langgraph==1.2.24"),
        python("openai-agents", "openai-agents==0.24.0"),
        python("pydantic-ai", "pydantic-ai-slim[openai]==2.68.0"),
        python("instructor", "instructor==1.17.0"),
        python("llama-index", "llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"),
        python("smolagents", "smolagents[openai]==1.26.0"),
        node("ai-sdk", "ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"),
        python("anthropic", "anthropic==2.14.0"),
        python("lm-eval", "lm-eval[api]==0.4.13", "transformers==5.23.0"),
        python("aiperf", "aiperf==0.13.0"),
        # Only its search in documents needs torch and the models that run on it.
        replace(
            python("open-webui", "open-webui==0.12.4"),
            without=("torch", "sentence-transformers", "accelerate", "faster-whisper"),
        ),
    )
}
