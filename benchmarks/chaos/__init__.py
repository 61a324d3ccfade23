"""Fault injection for a deployment under load, with a verdict on every request.

See `scripts/chaos --help`.
"""
