"""Select the workers of a request: a view of the cluster and pure decisions over it.

No await, no I/O.
"""
