"""Validate TensorRT-LLM arguments before anything is loaded, without TensorRT-LLM, a GPU or a network."""

from dynamo_trtllm.engines.trtllm.preflight.checks import check_pair, check_peers, check_role
from dynamo_trtllm.engines.trtllm.preflight.facts import Load, RoleFacts
from dynamo_trtllm.engines.trtllm.preflight.memory import MemoryTable, memory_table

__all__ = ["Load", "MemoryTable", "RoleFacts", "check_pair", "check_peers", "check_role", "memory_table"]
