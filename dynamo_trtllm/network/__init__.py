"""Sockets of all processes: listening, accepting connections, and the address at which other hosts reach this one."""
