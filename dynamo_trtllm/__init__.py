"""Disaggregated serving of large language models: prefill and decode run in separate worker
processes.
"""

__version__ = "0.1.0"
