"""The request plane: requests to workers, token streams back, control verbs. Carries values, decides nothing."""
