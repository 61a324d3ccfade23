"""Child processes that end with their parent: starting and stopping one, its port, and whether to start it again."""
