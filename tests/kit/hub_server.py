"""A Hugging Face Hub on localhost with one model.

It answers the requests that huggingface_hub makes, and can fail.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "org/tiny"


class HubServer:
    """A running hub. Its attributes may change while it runs.

    Args:
        files: content of the model's files by path.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.revisions = {"main": COMMIT, "v1": COMMIT, COMMIT: COMMIT}
        self.info_status = 200  # of the model's description
        self.info_error = ""  # X-Error-Code
        self.file_status = 200
        self.file_error = ""
        self.sizes: dict[str, int] = {}  # announced sizes that differ from the content
        self.cut_after: list[int] = []  # bytes after which the next downloads of weights break off
        # called when half of a file with weights is sent
        self.on_half: Callable[[], None] = lambda: None
        self.token = ""  # of the last request
        self.requests: list[str] = []
        self.ranges: list[str] = []  # of downloads that continue
        hub = self

        class Handler(_Handler):
            server_of = hub

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    server_of: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        hub = self.server_of
        path = unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        hub.token = self.headers.get("Authorization", "")
        if path.startswith("/api/"):
            self._answer_api(path)
        else:
            self._answer_file(path)

    do_HEAD = do_GET

    def _answer_api(self, path: str) -> None:
        hub = self.server_of
        if not path.startswith(f"/api/models/{NAME}"):
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if hub.info_status != 200:
            return self._send(hub.info_status, b"{}", {"X-Error-Code": hub.info_error})
        kind, _, revision = path.removeprefix(f"/api/models/{NAME}").strip("/").partition("/")
        if (revision or "main") not in hub.revisions:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if kind == "tree":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in hub.files.items()
            ]
            return self._send(200, json.dumps(tree).encode())
        siblings = [
            {"rfilename": name, "size": hub.sizes.get(name, len(data))}
            for name, data in hub.files.items()
        ]
        about = {
            "_id": "1",
            "id": NAME,
            "modelId": NAME,
            "sha": COMMIT,
            "private": False,
            "siblings": siblings,
        }
        return self._send(200, json.dumps(about).encode())

    def _answer_file(self, path: str) -> None:
        hub = self.server_of
        name = path.split("/", 5)[5]
        if hub.file_status != 200:
            return self._send(hub.file_status, b"", {"X-Error-Code": hub.file_error})
        data = hub.files[name]
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range")
        if asked is not None:
            first = int(asked.removeprefix("bytes=").rstrip("-"))
            hub.ranges.append(asked)
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            return self._send(206, data[first:], headers)
        if self.command == "GET" and name.endswith(".safetensors") and hub.cut_after:
            return self._send(200, data, headers, cut=hub.cut_after.pop(0))
        return self._send(200, data, headers)

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str] = {}, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(ConnectionError):  # the client has gone
                self._write(body, cut)
        self.close_connection = self.close_connection or cut is not None

    def _write(self, body: bytes, cut: int | None) -> None:
        self.wfile.write(body[: len(body) // 2] if cut is None else body[:cut])
        if cut is None:
            if self.path.endswith(".safetensors"):
                self.server_of.on_half()
            self.wfile.write(body[len(body) // 2 :])


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
