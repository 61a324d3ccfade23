"""Decide by its API key whether a request is served, and read the keys again when they change."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

from dynamo_trtllm.access.api_keys import MAX_KEY_CHARS, ApiKey, by_digest, digest_of
from dynamo_trtllm.access.key_usage import KeyUsage, UsageTable
from dynamo_trtllm.access.keys_file import KeysFile, read_keys
from dynamo_trtllm.access.web_pages import page_host
from dynamo_trtllm.config.http_access import HttpAccessConfig
from dynamo_trtllm.protocol.errors import (
    InvalidApiKey,
    PermissionDenied,
    RateLimitExceeded,
)
from dynamo_trtllm.support.file_watch import FileWatch
from dynamo_trtllm.support.http_server.exchange import HttpRequest, HttpResponse
from dynamo_trtllm.support.network.addresses import is_loopback

# Orchestrators ask these, and have no key. They reveal nothing but the state of this process.
PUBLIC_PATHS: Final = frozenset({"/live", "/ready"})
# These pages need no key: the user types one there, with which they get their data.
CONSOLE_PAGE: Final = "/"
DOCS_PAGE: Final = "/docs"
CONSOLE_FILES: Final = "/console/files/"
_CONSOLE: Final = "/console/"
_STATUS_PATHS: Final = frozenset({"/health", "/metrics"})
_OPEN_TO_ALL_KEYS: Final = frozenset({"/openapi.json"})
_API: Final = frozenset({"api", "all"})  # scopes of keys that are for requests to models
_STATUS: Final = frozenset({"status", "all"})  # scopes of keys that show the state
_MAX_CACHED_SCOPES: Final = 4096  # keys
_BLANKS: Final = " \t"  # that a header may have around a value; `strip` alone removes more
_SEND_KEY = "send one in the header Authorization: Bearer KEY"
_OTHER_MACHINE = (
    "this worker shows its state only to programs of its own machine; start it with --api-keys-file"
    " and send a key, or with --allow-anonymous"
)


@dataclass(frozen=True, slots=True, eq=False)
class Tenant:
    """The sender of a request: an API key, and what counts the usage of this key."""

    key: ApiKey
    usage: KeyUsage | None  # None: the key has no limits

    def may_use(self, model: str) -> bool:
        """Return whether this key may use a model."""
        return self.key.models is None or model in self.key.models

    def check_model(self, model: str) -> None:
        """Raise PermissionDenied if this key may not use a model."""
        if not self.may_use(model):
            raise PermissionDenied(
                f"this API key may not use model {model!r}; GET /v1/models lists those that it may"
                " use",
                field="model",
            )

    def scoped(self, name: str) -> str:
        """Return a hash of key and name, so that the same name of two keys gives two results."""
        return _scoped(self.key.name, name) if name else _scope_of(self.key.name)

    def priority(self, requested: int | None) -> int:
        """Return the priority of a request.

        Args:
            requested: the value in the request; None: it has none. Lower values are served first.

        Raises:
            PermissionDenied: the value is lower than that of the key.
        """
        if requested is None:
            return self.key.priority
        if requested < self.key.priority:
            raise PermissionDenied(
                f"priority is {requested}; with this API key, the lowest value is"
                f" {self.key.priority}",
                field="priority",
            )
        return requested


def _scoped(key_name: str, name: str) -> str:
    return hashlib.sha256(f"{key_name}\0{name}".encode()).hexdigest()[:32]


@lru_cache(maxsize=_MAX_CACHED_SCOPES)
def _scope_of(key_name: str) -> str:
    """Return the hash of a key and an empty name, which most requests need."""
    return _scoped(key_name, "")


def tenant_of(request: HttpRequest) -> Tenant | None:
    """Return the sender of a request; None if it is not known, because no keys are needed."""
    return request.sender if isinstance(request.sender, Tenant) else None


class AccessControl:
    """The API keys of a frontend or worker, and the checks of requests by them.

    A frontend without keys in its settings serves everyone.
    """

    def __init__(self, config: HttpAccessConfig, table: UsageTable | None = None) -> None:
        """Read the keys.

        Args:
            config: names the keys and their file.
            table: memory for the usage of keys, which all processes of the frontend share. Default:
                that of this process.

        Raises:
            ConfigError: the file of keys is wrong, can't be read, or has the name or the hash of a
                key of the settings.
        """
        self.needs_api_key = config.needs_api_key
        self._needs_certificate = config.needs_certificate
        self.has_console = False  # it serves the console, whose page and files need no key
        # The usage of keys. None: there is no file of keys, and no other keys have limits.
        self.usage: UsageTable | None = None
        self._allows_anonymous = config.allow_anonymous
        self._from_settings: dict[bytes, Tenant] = {}  # by digest of the key, as in `_tenants`
        for key in config.api_key:
            digest = digest_of(key)
            # Stored responses are found by this name, so it must not depend on the key's place in
            # the list, which may change.
            name = f"api-key-{digest.hex()[:8]}"
            named = ApiKey(name=name, sha256=digest.hex(), scope="all")
            self._from_settings[digest] = Tenant(named, None)
        self._tenants: Mapping[bytes, Tenant] = self._from_settings
        # Counts an event: the name of a metric, and the value of its label.
        self.count: Callable[[str, str], None] = _do_nothing
        self._watch: FileWatch[KeysFile] | None = None
        if config.api_keys_file is not None:
            self.usage = table or UsageTable()
            # It reads the file now, and again when it changes.
            self._watch = FileWatch(
                "API keys",
                [config.api_keys_file],
                partial(self._read, config.api_keys_file),
                self._use,
                lambda outcome: self.count("api_keys_reloads_total", outcome),
            )

    # --- the check of a request -------------------------------------------------------------------

    def check(self, request: HttpRequest, response: HttpResponse) -> None:
        """Check a request to a frontend before its body is read, count it, and note its sender.

        Raises:
            InvalidApiKey: it has no key, or not one that is valid now.
            PermissionDenied: the key is not for this path, or the client has no certificate.
            RateLimitExceeded: the key has sent too many requests.
        """
        is_open = not (self.needs_api_key or self._needs_certificate)
        if is_open or request.path in PUBLIC_PATHS:
            return
        scopes = _scopes(request.path)
        try:
            self._check_certificate(request)
            if not self.needs_api_key or self._is_page(request.path):
                return
            tenant = self._authorized(request, scopes)
            if tenant.usage is not None:
                tenant.usage.count_request()
        except (InvalidApiKey, PermissionDenied, RateLimitExceeded) as error:
            self.count("access_denied_total", error.code)
            raise
        request.sender = tenant

    def _is_page(self, path: str) -> bool:
        if path == DOCS_PAGE:
            return True
        return self.has_console and (path == CONSOLE_PAGE or path.startswith(CONSOLE_FILES))

    def check_again(self, request: HttpRequest) -> None:
        """Check the sender of a request that is being answered, without counting it.

        Raises:
            InvalidApiKey: its key is not valid any more.
            PermissionDenied: its key has got another scope.
        """
        if self.needs_api_key:
            self._authorized(request, _scopes(request.path))

    def check_status(self, request: HttpRequest, response: HttpResponse) -> None:
        """Check a request to a worker's system port, and note its sender if it has a key.

        Processes of this machine need no key, unless they may be a browser that runs a web page of
        another server. With --allow-anonymous, no client needs one. The handlers of /sleep and
        /wake check again who may use these.

        Raises:
            InvalidApiKey: it has no key, or not one that is valid now.
            PermissionDenied: the key is not for the status of processes, the request may be from a
                page, or the client has no certificate.
        """
        if request.path in PUBLIC_PATHS or self._allows_anonymous:
            return
        is_local = is_loopback(request.client)
        possible_page_host = page_host(request)
        if is_local and possible_page_host is None:
            return
        try:
            # A browser sends its certificate with the requests of every page, and a page may send
            # any key. So only a key that is checked shows that the client is no page.
            if is_local and not (self.needs_api_key and _key_of(request)):
                or_key = ", or send an API key" if self.needs_api_key else ""
                raise PermissionDenied(
                    f"the header Host is {possible_page_host!r}, which may be the name of a web"
                    f" page's server; call this worker by an IP address or as localhost{or_key}"
                )
            self._check_certificate(request)
            if not self.needs_api_key and not self._needs_certificate:
                raise InvalidApiKey(_OTHER_MACHINE)
            if self.needs_api_key:
                request.sender = self._authorized(request, _STATUS)
        except (InvalidApiKey, PermissionDenied) as error:
            self.count("access_denied_total", error.code)
            raise

    def _check_certificate(self, request: HttpRequest) -> None:
        """Raise PermissionDenied if the client needs a certificate and has none."""
        if self._needs_certificate and not request.has_client_certificate:
            raise PermissionDenied(
                "this server needs a client certificate (TLS) of a CA that it knows; connect with"
                " one"
            )

    def _authorized(self, request: HttpRequest, scopes: frozenset[str]) -> Tenant:
        """Return the sender of a request whose path needs a key with one of these scopes.

        Raises:
            InvalidApiKey: it has no key, or not one that is valid now.
            PermissionDenied: the key has another scope.
        """
        tenant = self._tenant(request)
        if tenant.key.scope not in scopes:
            raise PermissionDenied(
                f"this API key is not for {request.path}, which needs one with scope"
                f" {' or '.join(sorted(scopes, reverse=True))}"
            )
        return tenant

    def _tenant(self, request: HttpRequest) -> Tenant:
        """Return the sender of a request by its key. Raises InvalidApiKey."""
        key = _key_of(request)
        if not key:
            raise InvalidApiKey(f"this server needs an API key; {_SEND_KEY}")
        tenant = None
        # A longer one is no key, and its hash would take time.
        if len(key) <= MAX_KEY_CHARS:
            tenant = self._tenants.get(digest_of(key))
        if tenant is None:
            raise InvalidApiKey("the API key is not valid; check it, or ask for a new one")
        expires = tenant.key.expires
        if expires is not None and expires.timestamp() <= time.time():
            raise InvalidApiKey(f"the API key expired at {expires.isoformat()}; ask for a new one")
        return tenant

    # --- the file ---------------------------------------------------------------------------------

    async def follow_file(self) -> None:
        """Read the file of keys again whenever it has changed, until cancelled."""
        if self._watch is not None:
            await self._watch.follow()

    async def reload(self) -> None:
        """Read the file of keys again if it has changed.

        If it can't be read, the keys before it stay valid.
        """
        if self._watch is not None:
            await self._watch.reload()

    def _read(self, path: Path) -> KeysFile:
        """Return the content of the file. Raises ConfigError."""
        return read_keys(path, [tenant.key for tenant in self._from_settings.values()])

    def _use(self, content: KeysFile) -> None:
        """Use these keys from now on. Raises ConfigError."""
        assert self.usage is not None
        tenants = dict(self._from_settings)
        for digest, key in by_digest(content.keys).items():
            tenants[digest] = Tenant(key, self.usage.usage(key))
        self._tenants = tenants


def _scopes(path: str) -> frozenset[str]:
    """Return the scopes of keys that are for a path of a frontend."""
    if path in _OPEN_TO_ALL_KEYS:
        return _API | _STATUS
    if path in _STATUS_PATHS or path.startswith(_CONSOLE):
        return _STATUS
    return _API


def _do_nothing(metric: str, label: str) -> None: ...


def _key_of(request: HttpRequest) -> str:
    """Return the key that a request has in a header of OpenAI's or Anthropic's API; "": none."""
    authorization = request.header(b"authorization")
    if authorization is None:
        return (request.header(b"x-api-key") or "").strip(_BLANKS)
    # This header wins over x-api-key, even if it is empty or has another scheme.
    scheme, _, key = authorization.partition(" ")
    return key.strip(_BLANKS) if scheme.lower() == "bearer" else ""
