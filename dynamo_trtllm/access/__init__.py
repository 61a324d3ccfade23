"""API keys: which clients may use the API, and how much."""
