"""Lets NixlConnector of vLLM 0.24.0 hand over the KV of its CPU attention, whose layout it does not
know.

Put on PYTHONPATH by tests, so that vLLM's own processes load it. On GPUs it changes nothing. The
layout is one block after the other with K and V inside, as four dimensions where the connector
looks for five.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

_MODULE = "vllm.distributed.kv_transfer.kv_connector.utils"


class _Patch(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> object:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _teach(module.TransferTopology)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _teach(topology: type) -> None:
    settle = topology.__post_init__  # type: ignore[attr-defined]

    def settled(self: object) -> None:
        settle(self)
        if self.attn_backends[0].get_name() == "CPU_ATTN":  # type: ignore[attr-defined]
            self._is_kv_layout_blocks_first = True  # type: ignore[attr-defined]

    topology.__post_init__ = settled  # type: ignore[attr-defined]


sys.meta_path.insert(0, _Patch())
