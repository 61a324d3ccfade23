"""Child processes: start and stop one, keep several running, and find free ports for them."""
