"""Sends the API key of the environment, for frontends that need one."""

from __future__ import annotations

import os
from http.client import HTTPResponse
from typing import cast
from urllib.request import Request, urlopen

VARIABLE = "DYN_TRTLLM_API_KEY"


def sent_api_key() -> str:
    """Return the API key to send; "" if the environment has none.

    A frontend reads the same variable, where commas separate several keys. The first one is sent.
    """
    return os.environ.get(VARIABLE, "").partition(",")[0].strip()


def api_key_headers(key: str) -> dict[str, str]:
    """Return the header that sends an API key; no header for ""."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def open_url(url: str, timeout_s: float) -> HTTPResponse:
    """Send a GET request with the API key of the environment. Raise OSError as `urlopen` does."""
    request = Request(url, headers=api_key_headers(sent_api_key()))
    return cast("HTTPResponse", urlopen(request, timeout=timeout_s))
