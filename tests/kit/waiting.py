"""Timeout for conditions that normally hold at once.

It is long because a busy machine may pause for seconds.
"""

SOON_S = 10.0
