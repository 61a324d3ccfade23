"""The HTTP server of frontends and workers: limits of connections, error answers, how answers reach their sockets."""
