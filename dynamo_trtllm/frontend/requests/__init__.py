"""Serve a request: read, parse, plan, admit, route, answer and end it."""
