"""Define the OpenAI API's request models and response bodies. This package does no network I/O."""
