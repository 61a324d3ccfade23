"""Installs Dynamo's frontend and mock workers from PyPI into a separate environment, and starts
them.

Nothing of Dynamo is imported here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dynamo_trtllm.models.expand import write_tokenizer
from dynamo_trtllm.models.vocabulary import default_cache_dir

from .points import STEP_S
from .stack import HOST, MODEL, Certificate

VERSION = "1.6.1"
# Installed without dependencies: one of them can't be installed from PyPI, and neither frontend nor
# mocker imports it
_PACKAGES = (f"ai-dynamo=={VERSION}", f"ai-dynamo-runtime=={VERSION}")
_REQUIRED = (
    "aiohttp",
    "certifi",
    "kubernetes>=32.0.1,<33",
    "msgspec",
    "prometheus-client",
    "pydantic>=2.10.6,<=2.13.5",
    "pyzmq",
    "redis>=6.2,<9",
    "tqdm",
    "transformers",
    "typing-extensions",
    "uvloop",
    "zstandard",
)
_UNPACED = 1e6  # speed-up ratio; 0 would mean its default speed
_CONTEXT = 131_072
_TEMPLATE = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by"
    " OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: 2025-01-01\n\nReasoning: medium\n\n# Valid"
    " channels: analysis, commentary, final. Channel must be included for every message.<|end|>{%"
    " for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content"
    " }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "eos_token_id": 200002,
    "pad_token_id": 199999,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": _CONTEXT,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "sliding_window": 128,
    "torch_dtype": "bfloat16",
    "vocab_size": 201_088,
}


def default_folder() -> Path:
    return default_cache_dir() / f"dynamo-{VERSION}"


def install(folder: Path) -> None:
    """Create the environment and the model folder if they don't exist.

    Takes minutes. Raise CalledProcessError.
    """
    mark = folder / "model" / "config.json"  # written last
    if mark.is_file():
        return
    sys.stderr.write(f"installing Dynamo {VERSION} into {folder}\n")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", *_PACKAGES], check=True)
    subprocess.run([*pip, *_REQUIRED], check=True)
    write_model(folder / "model")


def write_model(folder: Path) -> None:
    """Write a tokenizer with gpt-oss's ids, a Harmony chat template, and a config without
    weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, context_length=_CONTEXT)
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    generation = {
        "bos_token_id": 199998,
        "eos_token_id": [200002, 199999, 200012],
        "pad_token_id": 199999,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")


class Dynamo:
    """Dynamo as a `Recipe`.

    `tokenizer` is an option of its frontend: "default", or "fastokens", which is faster.
    """

    api_key = ""
    certificate: Certificate | None = None
    num_consoles = 0
    framing_tokens = 0  # its mock engine makes arbitrary tokens

    def __init__(self, folder: Path, tokenizer: str) -> None:
        self.name = f"dynamo {tokenizer}"
        self.python = str(folder / "bin" / "python")
        self._model = str(folder / "model")
        self._tokenizer = tokenizer

    def env(self, etcd: str, nats: str) -> Mapping[str, str]:
        return {
            "ETCD_ENDPOINTS": etcd,
            "NATS_SERVER": nats,
            "HF_HUB_OFFLINE": "1",
            "DYN_TCP_RPC_HOST": HOST,
        }

    def frontend(self, port: int, pace_s: float) -> Sequence[str]:
        where = ("--http-host", HOST, "--http-port", str(port), "--router-mode", "round-robin")
        return ("-m", "dynamo.frontend", *where, "--tokenizer", self._tokenizer, *_planes())

    def worker(self, role: str, pace_s: float) -> Sequence[str]:
        speed = STEP_S / pace_s if pace_s else _UNPACED
        model = ("--model-path", self._model, "--model-name", MODEL, "--engine-type", "trtllm")
        engine = {
            "--disaggregation-mode": role,
            "--speedup-ratio": str(speed),
            "--kv-transfer-bandwidth": "0",
            "--max-num-seqs": "4096",
            "--max-num-batched-tokens": "1000000",
            "--num-gpu-blocks-override": "1000000",
        }
        return (
            "-m",
            "dynamo.mocker",
            *model,
            *(word for pair in engine.items() for word in pair),
            *_planes(),
        )


def _planes() -> Sequence[str]:
    return ("--discovery-backend", "etcd", "--request-plane", "nats", "--event-plane", "nats")
