"""Start, connect and supervise the parts of a frontend, in one process or several."""
