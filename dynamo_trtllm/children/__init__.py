"""Child processes that end with their parent: starting one, stopping it, and whether to start it again."""
