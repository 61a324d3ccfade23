"""Decide by the API key of a request whether to serve it, and reload keys that have changed."""

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

# Orchestrators request these paths, and have no key. The answers reveal only whether this process
# is live and ready.
PUBLIC_PATHS: Final = frozenset({"/live", "/ready"})
# These pages need no key. The user types a key into a page, and the page sends it for its data.
CONSOLE_PAGE: Final = "/"
DOCS_PAGE: Final = "/docs"
CONSOLE_FILES: Final = "/console/files/"
_CONSOLE: Final = "/console/"
_STATUS_PATHS: Final = frozenset({"/health", "/metrics"})
_OPEN_TO_ALL_KEYS: Final = frozenset({"/openapi.json"})
_API: Final = frozenset({"api", "all"})  # scopes of keys that may send requests to models
_STATUS: Final = frozenset({"status", "all"})  # scopes of keys that may read the state
_MAX_CACHED_HASHES: Final = 4096  # most keys whose hash is cached
# The blanks that a header may have around a value. `strip` without arguments removes more.
_BLANKS: Final = " \t"
_SEND_KEY = "send one in the header Authorization: Bearer KEY"
_OTHER_MACHINE = (
    "this worker shows its state only to programs of its own machine; start it with --api-keys-file"
    " and send a key, or with --allow-anonymous"
)


@dataclass(frozen=True, slots=True, eq=False)
class Tenant:
    """The sender of a request: an API key, and the object that counts the usage of the key."""

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
        """Return a hash of key and name. Two keys get different hashes for the same name."""
        return _scoped(self.key.name, name) if name else _scope_of(self.key.name)

    def priority(self, requested: int | None) -> int:
        """Return the priority of a request.

        Args:
            requested: the priority in the request. None: the request has no priority. Requests with
                lower values are served first.

        Raises:
            PermissionDenied: the priority is lower than that of the key.
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


@lru_cache(maxsize=_MAX_CACHED_HASHES)
def _scope_of(key_name: str) -> str:
    """Return the hash of a key and an empty name. Most requests need this hash."""
    return _scoped(key_name, "")


def tenant_of(request: HttpRequest) -> Tenant | None:
    """Return the sender of a request, or None if requests need no key."""
    return request.sender if isinstance(request.sender, Tenant) else None


class AccessControl:
    """The API keys of a frontend or worker, and the checks of requests by them.

    A frontend without keys in its settings serves everyone.
    """

    def __init__(self, config: HttpAccessConfig, table: UsageTable | None = None) -> None:
        """Read the keys.

        Args:
            config: names the keys and their file.
            table: the memory for the usage of keys, which all processes of the frontend share.
                Default: memory of this process only.

        Raises:
            ConfigError: the file of keys is wrong or can't be read, or a key in it has the name or
                the hash of a key of the settings.
        """
        self.needs_api_key = config.needs_api_key
        self._needs_certificate = config.needs_certificate
        # True: the server has the console. Its page and files need no key.
        self.has_console = False
        # The usage of keys. None: there is no file of keys. Only keys of a file have limits.
        self.usage: UsageTable | None = None
        self._allows_anonymous = config.allow_anonymous
        # The keys of the settings, by digest of the key.
        self._from_settings: dict[bytes, Tenant] = {}
        for key in config.api_key:
            digest = digest_of(key)
            # Stored responses are found by this name. So the name must not depend on the place of
            # the key in the list, because this place may change.
            name = f"api-key-{digest.hex()[:8]}"
            named = ApiKey(name=name, sha256=digest.hex(), scope="all")
            self._from_settings[digest] = Tenant(named, None)
        # All keys, by digest of the key.
        self._tenants: Mapping[bytes, Tenant] = self._from_settings
        # Counts an event in a metric. The arguments are the name of the metric and its label.
        self.count: Callable[[str, str], None] = _do_nothing
        self._watch: FileWatch[KeysFile] | None = None
        if config.api_keys_file is not None:
            self.usage = table or UsageTable()
            # This reads the file now, and again when it has changed.
            self._watch = FileWatch(
                what="API keys",
                paths=[config.api_keys_file],
                read=partial(self._read, config.api_keys_file),
                use=self._use,
                count=lambda outcome: self.count("api_keys_reloads_total", outcome),
            )

    # --- the check of a request -------------------------------------------------------------------

    def check(self, request: HttpRequest, response: HttpResponse) -> None:
        """Check a request to a frontend before its body is read, count it, and note its sender.

        Raises:
            InvalidApiKey: the request has no key that is valid now.
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
            InvalidApiKey: the key of the request is no longer valid.
            PermissionDenied: the key is no longer for this path.
        """
        if self.needs_api_key:
            self._authorized(request, _scopes(request.path))

    def check_status(self, request: HttpRequest, response: HttpResponse) -> None:
        """Check a request to a worker's system port, and note its sender if it has a key.

        Processes of this machine need no key, unless the process may be a browser that runs a web
        page of another server. With --allow-anonymous, no client needs a key. The handlers of
        /sleep and /wake also check who may use these paths.

        Raises:
            InvalidApiKey: the request needs a key, and has no key that is valid now.
            PermissionDenied: the key is not for the status of processes, the request may come from
                a web page, or the client has no certificate.
        """
        if request.path in PUBLIC_PATHS or self._allows_anonymous:
            return
        is_local = is_loopback(request.client)
        possible_page_host = page_host(request)
        if is_local and possible_page_host is None:
            return
        try:
            # The request may come from a web page. A certificate does not exclude this, because a
            # browser sends it with the requests of every page. A valid key does exclude it, because
            # a page does not know one.
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
            InvalidApiKey: the request has no key that is valid now.
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
        """Return the sender to whom the key of a request belongs. Raises InvalidApiKey."""
        key = _key_of(request)
        if not key:
            raise InvalidApiKey(f"this server needs an API key; {_SEND_KEY}")
        tenant = None
        # A longer text can't be a key. It is not hashed, because that would take time.
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

        If the file can't be read, the former keys stay valid.
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
    """Return the key in the header that OpenAI's or Anthropic's API uses, or "" without a key."""
    authorization = request.header(b"authorization")
    if authorization is None:
        return (request.header(b"x-api-key") or "").strip(_BLANKS)
    # The header Authorization overrides x-api-key, even if it is empty or has another scheme.
    scheme, _, key = authorization.partition(" ")
    return key.strip(_BLANKS) if scheme.lower() == "bearer" else ""
