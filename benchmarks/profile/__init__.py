"""The guides' benchmarks as one command: a shape, its load, records of every request, and a report to look at.

It measures servers that others started; it starts none.
"""

PROG = "python -m benchmarks.profile"
