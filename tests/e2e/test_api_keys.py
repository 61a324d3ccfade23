"""API keys of a frontend with several processes."""

from __future__ import annotations

import secrets
from pathlib import Path

import httpx

from dynamo_trtllm.access.api_keys import ApiKey, digest_of, new_key
from dynamo_trtllm.access.keys_file import add_key, remove_key
from tests.kit.cluster import PLAIN, Cluster, until


def test_limit_and_revocation_hold_for_all_processes(
    etcd_server: str, nats_server: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys.jsonl"
    key = new_key()
    add_key(path, ApiKey(name="alice", sha256=digest_of(key).hex(), requests_per_minute=20))
    headers = {"Authorization": f"Bearer {key}"}
    flags = ["--workers", "2", "--api-keys-file", str(path)]
    cluster = Cluster(etcd_server, nats_server, f"keys-{secrets.token_hex(4)}", flags)

    def status() -> int:
        # Each request has its own connection, which comes to either process.
        return httpx.get(f"{url}/v1/models", headers=headers, timeout=30, **PLAIN).status_code

    try:
        url = cluster.frontend.url()
        for name in ("frontend-1", "frontend-2"):
            cluster.frontend.wait_for(rf"{name} .*listening on")
        answered = [status() for _ in range(60)]
        assert answered == [200] * 20 + [429] * 40
        remove_key(path, "alice")
        until(lambda: {status() for _ in range(12)} == {401}, timeout_s=30.0)
    finally:
        cluster.stop()
