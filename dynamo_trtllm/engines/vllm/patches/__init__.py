"""Mend faults of vLLM at run time: one module for each fault.

`patch.Patch` says what a module records.
"""
