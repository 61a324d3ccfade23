"""Reject requests that a web page makes a user's browser send to a frontend without API keys.

The browser of a user can reach a frontend on the user's machine, and so can every page in the
browser. If requests need a key, a page can't send them, because it does not know a key. Without
keys, a page can send requests. The page can also let the name of its own server resolve to this
machine (DNS rebinding), and then even read the answers.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from dynamo_trtllm.protocol.errors import PermissionDenied
from dynamo_trtllm.support.http_server.exchange import HttpRequest

_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_OTHER_SITES: Final = frozenset({"cross-site", "same-site"})


@dataclass(frozen=True, slots=True)
class PageGuard:
    """The names by which a frontend may be called, and the pages that may call it."""

    # The names that the header Host may have. Names that no page on the Internet has are always
    # allowed. None: all names are allowed.
    hosts: Set[str] | None
    origins: Set[str]  # the origins of --cors-origins

    def check(self, request: HttpRequest) -> None:
        """Check that a request is not from a page of another server.

        Raises:
            PermissionDenied: the request is from such a page.
        """
        self.check_host(request)
        if request.method in _SAFE_METHODS:
            return  # the request changes nothing, and the browser does not show the page the answer
        host = (request.header(b"host") or "").lower()
        origin = request.header(b"origin")
        if origin is None:
            is_other = request.header(b"sec-fetch-site") in _OTHER_SITES
        else:
            _, _, origin_host = origin.lower().partition("://")
            is_other = origin_host != host and not self.origins & {"*", origin}
        if is_other:
            raise PermissionDenied(
                f"a web page of {origin or 'another site'} may not send requests to this server; to"
                " allow it, set --cors-origins, or use API keys"
            )

    def check_host(self, request: HttpRequest) -> None:
        """Raise PermissionDenied if this server is not called by one of its names."""
        if self.hosts is None:
            return
        name = page_host(request)
        if name is not None and name not in self.hosts:
            raise PermissionDenied(
                f"the header Host is {name!r}, which is not a name of this server; if it is one,"
                " add it to --allowed-hosts"
            )


def page_host(request: HttpRequest) -> str | None:
    """Return the name in the header Host if a page of that server may send the request.

    None: there is no such header, or no page on the Internet can be loaded from the name.
    """
    host = request.header(b"host")
    if host is None:
        return None
    name = _without_port(host).lower()
    return None if _is_local_name(name) else name


def _without_port(host: str) -> str:
    """Return the name or address in a Host header."""
    if host.startswith("["):
        address, _, _ = host[1:].partition("]")
        return address
    name, _, _ = host.partition(":")
    return name


def _is_local_name(name: str) -> bool:
    """Return whether no page on the Internet can be loaded from this name.

    This is true for IP addresses, which are not resolved, and for names without a dot, which no one
    can register.
    """
    if "." not in name or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
