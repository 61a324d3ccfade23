"""What makes the stand-in work. The real package has nothing of this name."""
