"""Serve the OpenAI API over HTTP: routes, admission, bodies, and the responses of generations."""
