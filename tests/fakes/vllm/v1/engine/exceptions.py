class EngineGenerateError(Exception):
    """Raised when a AsyncLLM.generate() fails. Recoverable."""


class EngineDeadError(Exception):
    """Raised when the EngineCore dies. Unrecoverable."""
