"""Command-line tools that start no process of a deployment: they look, judge or talk to one. May import every room."""
