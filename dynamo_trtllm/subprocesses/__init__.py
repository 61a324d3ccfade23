"""Child processes: start and stop one, find free ports for it, and decide whether to restart it."""
