"""Transfer KV from prefill workers to decode workers, as regions of memory.

This package depends neither on the engine nor on the model.
"""
