"""Sockets of all processes: where they listen, how they accept connections, which address other hosts reach."""
