"""Logging and Prometheus metrics of all processes."""
