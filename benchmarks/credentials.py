"""Send frontends the API key and the client certificate of the environment, if it has them.

The variables are those of `dynamo-trtllm chat` and `status`.
"""

from __future__ import annotations

import os
import ssl
from http.client import HTTPResponse
from pathlib import Path
from typing import cast
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import HTTPSHandler, OpenerDirector, ProxyHandler, Request, build_opener

from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.tls import client_context, untrusted
from dynamo_trtllm.support.tls_files import ClientTlsFiles

VARIABLE = "DYN_TRTLLM_API_KEY"
CERTIFICATE_VARIABLE = "DYN_TRTLLM_TLS_CLIENT_CERT_FILE"
KEY_VARIABLE = "DYN_TRTLLM_TLS_CLIENT_KEY_FILE"


def sent_api_key() -> str:
    """Return the API key to send; "" if the environment has none.

    A frontend reads the same variable, where commas separate several keys. The first one is sent.
    """
    return os.environ.get(VARIABLE, "").partition(",")[0].strip()


def api_key_headers(key: str) -> dict[str, str]:
    """Return the header that sends an API key; no header for ""."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def tls_context(url: str) -> ssl.SSLContext | None:
    """Return the context for an https:// server, with the certificate of the environment.

    Return None for http://. Raises ConfigError if the certificate can't be used.
    """
    certificate = os.environ.get(CERTIFICATE_VARIABLE)
    key = os.environ.get(KEY_VARIABLE)
    if not certificate and not key:
        return client_context(url)
    if not certificate or not key:
        raise ConfigError(f"only one of {CERTIFICATE_VARIABLE} and {KEY_VARIABLE} is set; set both")
    return client_context(url, ClientTlsFiles(Path(certificate), Path(key)))


def direct_opener(tls: ssl.SSLContext | None = None) -> OpenerDirector:
    """Return what opens URLs without a proxy of the environment, as the clients of a load do."""
    return build_opener(ProxyHandler({}), HTTPSHandler(context=tls))


def open_url(url: str, timeout_s: float) -> HTTPResponse:
    """Send a GET request with the API key and the certificate of the environment.

    Raises:
        OSError: as `urlopen` of the library, and if the server is not trusted.
        ConfigError: the certificate can't be used.
    """
    request = Request(url, headers=api_key_headers(sent_api_key()))
    try:
        return cast("HTTPResponse", direct_opener(tls_context(url)).open(request, None, timeout_s))
    except URLError as exc:
        if isinstance(exc.reason, ssl.SSLCertVerificationError):
            raise untrusted(urlsplit(url).hostname or "", exc.reason) from exc
        raise
