"""The preflight rules of the trtllm engine.

Each module has the rules of one section of docs/preflight.md.
"""
