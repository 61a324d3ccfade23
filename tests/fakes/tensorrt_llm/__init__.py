"""A stand-in for TensorRT-LLM: its names and its manners, computed with the torch engine.

Not NVIDIA's package.

Plays the release in STANDIN_RELEASE (default 1.2.1); STANDIN_TRAPS switches behaviours
(`standin/traps.py`). Only tests and `scripts/demo --stand-in` put the folder above this one on the
path.
"""

import logging

from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.llmapi import LLM
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.version import __version__

__all__ = ["LLM", "DisaggregatedParams", "SamplingParams", "__version__"]

logging.getLogger(__name__).warning(
    "STAND-IN: this is not TensorRT-LLM but tests/fakes/tensorrt_llm, which plays %s with the torch"
    " engine",
    __version__,
)
