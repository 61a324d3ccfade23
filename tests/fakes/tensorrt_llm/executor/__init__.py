"""Names that the real `tensorrt_llm.executor` exports."""

from tensorrt_llm.executor.executor import GenerationExecutor
from tensorrt_llm.executor.result import CompletionOutput, GenerationResult, IterationResult
from tensorrt_llm.executor.utils import RequestError

__all__ = [
    "CompletionOutput",
    "GenerationExecutor",
    "GenerationResult",
    "IterationResult",
    "RequestError",
]
