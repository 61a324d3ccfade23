"""deploy/make_secrets: what compose and Kubernetes get, and that other users can not read it."""

from __future__ import annotations

import base64
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.cluster.discovery.etcd_connection import channel_credentials
from dynamo_trtllm.cluster.request_plane.nats_connection import NatsAccess
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.kv_transfer.keys import read_keys
from tests.unit.deploy.kustomize import read_documents
from tests.unit.deploy.recipes import ROOT, deployed, environment, frontends, planners, workers
from tests.unit.deploy.test_recipe_schemas import check

PROGRAM = ROOT / "deploy" / "make_secrets"
SECRETS = {
    "etcd-server-tls",
    "nats-server-tls",
    "frontend-tls",
    "worker-tls",
    "planner-tls",
    "tool-tls",
    "etcd-root-tls",
    "nats-routes",
    "dynamo-platform",
    "kv-transfer-key",
}


def made(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *words], capture_output=True, text=True, check=False)


def frontend(environ: dict[str, str]) -> FrontendConfig:
    return load(FrontendConfig, prog="p", argv=[], environ=environ)


def pairs(path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in path.read_text().splitlines())


def test_compose_secrets_are_readable_by_owner_and_processes(tmp_path: Path) -> None:
    done = made("compose", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    secrets = tmp_path / "compose" / "secrets"
    config = frontend(pairs(secrets / "client.env"))
    assert channel_credentials(config) is not None
    environ = pairs(tmp_path / ".env")
    user = environ.pop("DYNAMO_USER")
    assert user == (f"{os.getuid()}:{os.getgid()}" if os.getuid() else "10001:10001")
    for path in (secrets / "server.key", tmp_path / "compose/data/etcd"):
        assert str(path.stat().st_uid) == user.partition(":")[0]
    assert (secrets / "root.key").stat().st_uid == os.getuid()
    assert environ.keys() == {"GRAFANA_PASSWORD"}
    assert NatsAccess.of(config).tls_context().get_ca_certs()
    assert all(re.fullmatch(r"p[0-9a-f]{40}", value) for value in environ.values())
    environ = pairs(secrets / "client.env")
    assert len(read_keys(Path(environ["DYN_TRTLLM_KV_TRANSFER_KEY_FILE"]))) == 1
    assert not (secrets / "ca.key").exists()  # with it more certificates could be made
    for path in [tmp_path / ".env", *secrets.iterdir()]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for name in ("etcd", "nats"):
        assert stat.S_IMODE((tmp_path / "compose/data" / name).stat().st_mode) == 0o700
    before = (tmp_path / ".env").read_text()
    assert "exists" in made("compose", "--folder", str(tmp_path)).stdout
    assert (tmp_path / ".env").read_text() == before


def test_worker_is_added_to_secrets_that_exist(tmp_path: Path) -> None:
    words = ("compose", "--folder", str(tmp_path))
    made(*words, "--worker", "prefill-1")
    secrets = tmp_path / "compose" / "secrets"
    before = {path.name: path.read_bytes() for path in secrets.iterdir()}
    done = made(*words, "--worker", "prefill-1", "--worker", "decode-1")
    assert done.returncode == 0, done.stderr
    assert "added" in done.stdout
    # Both commands replace all users, so they need all workers.
    assert done.stdout.count("--worker decode-1 --worker prefill-1") == 2
    names = {"worker-decode-1.crt", "worker-decode-1.key", "worker-decode-1.env"}
    assert {path.name for path in secrets.iterdir()} == {*before, *names}
    authorities = before.pop("ca.crt")
    assert (secrets / "ca.crt").read_bytes().startswith(authorities)
    assert {name: (secrets / name).read_bytes() for name in before} == before
    for worker in ("prefill-1", "decode-1"):
        certificate = secrets / f"worker-{worker}.crt"
        assert common_name(certificate.read_text()) == f"worker-{worker}"
        command = ["openssl", "verify", "-CAfile", secrets / "ca.crt", certificate]
        subprocess.run(command, check=True, capture_output=True)
    assert stat.S_IMODE((secrets / "worker-decode-1.key").stat().st_mode) == 0o600


def test_kubernetes_secrets_are_those_the_recipes_mount() -> None:
    done = made("kubernetes", "--namespace", "demo")
    docs = {doc["metadata"]["name"]: doc for doc in read_documents(done.stdout)}
    assert set(docs) == SECRETS
    for doc in docs.values():
        check(doc)
        assert doc["metadata"]["namespace"] == "demo"
    environ = {name: decoded(text) for name, text in docs["dynamo-platform"]["data"].items()}
    config = frontend(environ)
    (pod, *_) = frontends(deployed("trtllm/agg"))
    mounted = next(
        m["mountPath"] for m in pod.container["volumeMounts"] if m["name"] == "cluster-tls"
    )
    for path in (config.etcd_ca, config.etcd_cert, config.etcd_key):
        assert path is not None
        assert path.parent.as_posix() == mounted
        assert path.name in docs["frontend-tls"]["data"]
    assert config.nats_server == "tls://nats:4222"
    assert (config.nats_cert, config.nats_key) == (config.etcd_cert, config.etcd_key)
    for user in ("frontend", "worker", "planner", "tool"):
        certificate = decoded(docs[f"{user}-tls"]["data"]["tls.crt"])
        assert common_name(certificate) == user
    assert common_name(decoded(docs["etcd-root-tls"]["data"]["tls.crt"])) == "root"
    assert common_name(decoded(docs["etcd-server-tls"]["data"]["tls.crt"])) == "server"


def common_name(certificate: str) -> str:
    done = subprocess.run(
        ["openssl", "x509", "-noout", "-subject", "-nameopt", "multiline"],
        input=certificate,
        capture_output=True,
        text=True,
        check=True,
    )
    match = re.search(r"commonName\s*= (\S+)", done.stdout)
    assert match is not None
    return match.group(1)


@pytest.mark.parametrize("recipe", ["trtllm/agg", "trtllm/disagg", "vllm/elastic"])
def test_pods_have_the_certificate_of_their_role_alone(recipe: str) -> None:
    pods = deployed(recipe)
    assert frontends(pods)
    assert workers(pods)
    of_role = {"frontend": frontends, "worker": workers, "planner": planners}
    for role, find in of_role.items():
        for pod in find(pods):
            volumes = pod.spec["volumes"]
            names = {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}
            assert {name for name in names if name.endswith("-tls")} == {f"{role}-tls"}


@pytest.mark.parametrize("recipe", ["trtllm/disagg", "trtllm/disagg-8gpu", "vllm/elastic"])
def test_recipes_mount_the_key_into_workers_alone(recipe: str) -> None:
    done = made("kubernetes", "--namespace", "demo")
    secrets = {doc["metadata"]["name"]: doc for doc in read_documents(done.stdout)}
    pods = deployed(recipe)
    assert {"kv-transfer-key"} <= set(secrets)
    for pod in workers(pods):
        mounts = {mount["name"]: mount["mountPath"] for mount in pod.container["volumeMounts"]}
        key_file = Path(environment(pod)["DYN_TRTLLM_KV_TRANSFER_KEY_FILE"])
        assert key_file.parent.as_posix() == mounts["kv-transfer-key"]
        assert key_file.name in secrets["kv-transfer-key"]["data"]
    for pod in frontends(pods):
        assert "kv-transfer-key" not in [mount["name"] for mount in pod.container["volumeMounts"]]


def decoded(text: str) -> str:
    return base64.b64decode(text).decode()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compose", "--worker", "a/b"], "letters, digits"),
        (["kubernetes", "--namespace", "n", "--worker", "a"], "--worker is for compose"),
        (["kubernetes"], "--namespace"),
        (["compose", "--hosts"], "unknown argument"),
        ([], "usage"),
    ],
)
def test_secrets_when_given_nonsense_then_says_so(words: list[str], said: str) -> None:
    done: Any = made(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""
