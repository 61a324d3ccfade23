"""What the stand-in is made of, and how a test makes it misbehave."""
