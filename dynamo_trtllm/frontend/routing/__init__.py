"""Route requests: know the workers of each model, choose among them, and call them until the end.

Choosing is pure: it reads the view of the workers, and does no I/O.
"""
