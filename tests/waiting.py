"""How long tests wait for what comes at once. No test may count on a quick machine: any may stop for seconds."""

SOON_S = 10.0
"""Bound of a wait for a condition; of an end that would else take for ever, or far longer than this."""
