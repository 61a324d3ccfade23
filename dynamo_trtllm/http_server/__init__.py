"""The HTTP server of frontends and workers: limits of connections, error answers, and writing answers to sockets."""
