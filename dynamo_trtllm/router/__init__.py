"""Where a request goes: a view of the cluster and pure decisions over it. No await, no I/O."""
