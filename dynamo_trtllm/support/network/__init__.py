"""Sockets of all processes: listening, accepting connections, and finding this host's address."""
