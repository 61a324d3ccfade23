"""The HTTP frontend: takes OpenAI requests, calls prefill and decode workers, streams tokens. Imports no engine."""
