"""Names that the real `tensorrt_llm.llmapi` exports."""

from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor import CompletionOutput, RequestError
from tensorrt_llm.llmapi.llm import LLM, RequestOutput
from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "DisaggregatedParams",
    "GuidedDecodingParams",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
]
