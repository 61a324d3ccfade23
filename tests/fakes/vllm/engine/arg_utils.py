from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dynamo_trtllm.engines.vllm.api_manifests import LIBRARY
from vllm.config import VllmConfig
from vllm.usage.usage_lib import UsageContext


class AsyncEngineArgs:
    def __init__(self, **values: Any) -> None:
        for name in values:
            if name not in LIBRARY.newest.fields(LIBRARY.root):
                raise TypeError(
                    f"AsyncEngineArgs.__init__() got an unexpected keyword argument {name!r}"
                )
        self.values = values

    def create_engine_config(self, usage_context: UsageContext | None = None) -> VllmConfig:
        get = self.values.get
        is_server = usage_context is UsageContext.OPENAI_API_SERVER
        model = json.loads((Path(get("model", "")) / "config.json").read_text())
        longest = model["max_position_embeddings"]
        if (get("max_model_len") or 0) > longest:
            raise ValueError(
                f"User-specified max_model_len ({get('max_model_len')}) is greater than {longest}"
            )
        transfer = get("kv_transfer_config")
        if transfer is not None and transfer.kv_connector != "NixlConnector":
            raise ValueError(f"Unsupported connector type: {transfer.kv_connector}")
        return VllmConfig(
            model_config=SimpleNamespace(
                enforce_eager=bool(get("enforce_eager")),
                max_model_len=get("max_model_len") or longest,
                max_logprobs=20,
                dtype="torch.float32",
            ),
            cache_config=SimpleNamespace(
                block_size=get("block_size") or 16,
                num_gpu_blocks=get("num_gpu_blocks_override") or 1001,
                cache_dtype=get("kv_cache_dtype") or "auto",
            ),
            parallel_config=SimpleNamespace(
                world_size=get("tensor_parallel_size") or 1,
                tensor_parallel_size=get("tensor_parallel_size") or 1,
                data_parallel_index=0,
                data_parallel_size=get("data_parallel_size") or 1,
                enable_expert_parallel=bool(get("enable_expert_parallel")),
            ),
            scheduler_config=SimpleNamespace(
                max_num_seqs=get("max_num_seqs") or 256,
                max_num_batched_tokens=get("max_num_batched_tokens")
                or (8192 if is_server else 2048),
                disable_hybrid_kv_cache_manager=False,
                policy=get("scheduling_policy") or "fcfs",
            ),
            device_config=SimpleNamespace(device_type="cuda"),
            compilation_config=SimpleNamespace(
                cudagraph_capture_sizes=get("cudagraph_capture_sizes") or [1, 2, 4, 8]
            ),
            attention_config=SimpleNamespace(backend=None),
            kv_transfer_config=transfer,
            vocab_size=model["vocab_size"],
        )
