"""Logs, metrics, traces and recordings of all processes."""
