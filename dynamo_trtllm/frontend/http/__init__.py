"""Serve the OpenAI API over HTTP: bind APIs to routes, and answer what needs no generation."""
