"""What all processes are built with: background tasks, subprocesses, sockets, the HTTP server."""
