"""Transfer KV from prefill workers to decode workers, as regions of memory, independent of engine
and model.
"""
