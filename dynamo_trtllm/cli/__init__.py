"""Command-line tools that inspect, check or talk to a deployment and start none. May import every package."""
