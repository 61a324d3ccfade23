"""Command-line tools that check, clear or chat with a deployment. They may import every package."""
