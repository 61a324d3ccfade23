"""The error of one request; the executor goes on."""


class RequestError(RuntimeError):
    """Raised from a request's `await` or `async for`, or at its submission."""
