"""Measures the cost of frontend and request plane per token, alone or beside Dynamo.

See docs/performance.md.
"""
