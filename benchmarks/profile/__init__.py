"""Sends a load to a running server, and writes a report."""

PROG = f"python -m {__name__}"
