"""A deployment under load, a fault in the middle, and a judgment of every request. See `scripts/chaos --help`."""
