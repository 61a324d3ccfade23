"""What a process tells: log lines in one format, and one table of metric names. Configured by entry points only."""
