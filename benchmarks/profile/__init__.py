"""Runs the benchmarks of the Dynamo gpt-oss-120b guides against a running server and writes a
report.
"""

PROG = f"python -m {__name__}"
