"""Benchmarks and fault injection. docs/benchmarks.md lists the commands."""
