"""The request plane: requests to workers, token streams from workers, and control verbs."""
