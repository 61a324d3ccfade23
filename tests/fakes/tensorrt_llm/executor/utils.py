"""The error of one request; the executor goes on."""


class RequestError(RuntimeError):
    """Raised from a request's `await` or `async for`, or at its submission."""


class RPCError(Exception):
    """A remote call failed: no subclass of RuntimeError, as in executor/rpc/rpc_common.py."""
