"""The HTTP server of frontends and workers: connection limits, error responses and writing
responses to sockets.
"""
