"""Who may connect to whom by the network policies of the recipes, evaluated as Kubernetes does: a
connection needs a rule of the source's egress policies and one of the target's ingress policies.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.kit.cases import each_case
from tests.unit.deploy.kustomize import Doc, documents, render
from tests.unit.deploy.recipes import (
    MODEL,
    RECIPES,
    TARGETS,
    deployed,
    matches,
    name_of,
    of_kind,
    pods,
)

DISAGG = "gpt-oss-disagg"
OTHER = "gpt-oss-vllm-disagg"
PORTS = {"http": 8000, "system": 9090}
UCX = 40000  # some port that a library chose


class Peer(NamedTuple):
    """A pod as policies see it, or an address outside the cluster if it has no labels."""

    labels: dict[str, str]
    namespace: str = "ours"
    address: str = ""


DNS = Peer({"k8s-app": "kube-dns"}, "kube-system")
PROMETHEUS = Peer({"app.kubernetes.io/name": "prometheus"}, "monitoring")
STRANGER = Peer({"app": "stranger"}, "other")
NEIGHBOR = Peer({"app": "neighbor"})
WORLD = Peer({}, "", "203.0.113.7")
METADATA = Peer({}, "", "169.254.169.254")


def everything() -> list[Doc]:
    """All that may be applied together in one Kubernetes namespace."""
    docs = render(RECIPES / "platform/overlays/production")
    for target in TARGETS:
        docs += deployed(target)
    docs += documents(MODEL / "model-cache/model-download.yaml")
    for path in sorted(MODEL.rglob("perf.yaml")):
        docs += documents(path)
    return docs


DOCS = everything()
POLICIES = of_kind(DOCS, "NetworkPolicy")


def peer(owner: str) -> Peer:
    (found,) = [pod for pod in pods(DOCS) if pod.owner == owner]
    return Peer(found.labels)


def is_outside(address: str, block: Doc) -> bool:
    value = ipaddress.ip_address(address)
    if value not in ipaddress.ip_network(block["cidr"]):
        return True
    return any(value in ipaddress.ip_network(excluded) for excluded in block.get("except", []))


def is_peer(rule: Doc, other: Peer) -> bool:
    if "ipBlock" in rule:
        return bool(other.address) and not is_outside(other.address, rule["ipBlock"])
    if other.address or not matches(rule.get("podSelector", {}), other.labels):
        return False
    if "namespaceSelector" not in rule:
        return other.namespace == "ours"
    return matches(rule["namespaceSelector"], {"kubernetes.io/metadata.name": other.namespace})


def rules(of: Peer, direction: str) -> Iterator[Doc] | None:
    """Return the rules of the policies of a pod, or None if it has no policy of this direction."""
    mine = [
        doc["spec"]
        for doc in POLICIES
        if of.namespace == "ours"
        and direction in doc["spec"]["policyTypes"]
        and matches(doc["spec"]["podSelector"], of.labels)
    ]
    if not mine:
        return None
    return (rule for spec in mine for rule in spec.get(direction.lower(), []))


def is_allowed(of: Peer, direction: str, other: Peer, port: int, protocol: str) -> bool:
    if of.address:
        return True
    found = rules(of, direction)
    if found is None:
        return True
    key = "to" if direction == "Egress" else "from"
    for rule in found:
        listed = rule.get("ports")
        fits = not listed or any(
            PORTS.get(entry["port"], entry["port"]) == port
            and entry.get("protocol", "TCP") == protocol
            for entry in listed
        )
        if fits and (key not in rule or any(is_peer(peer, other) for peer in rule[key])):
            return True
    return False


def connects(source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    leaves = is_allowed(source, "Egress", target, port, protocol)
    return leaves and is_allowed(target, "Ingress", source, port, protocol)


FRONTEND, PREFILL, DECODE = (peer(f"{DISAGG}-{role}") for role in ("frontend", "prefill", "decode"))
PLANNER = peer("gpt-oss-vllm-elastic-planner")
ETCD, NATS = peer("etcd"), peer("nats")
ETCD_USERS = peer("etcd-users")
DOWNLOAD, PERF = peer("model-download"), peer("gpt-oss-120b-disagg-bench")


@pytest.mark.parametrize("client", [FRONTEND, PREFILL, DECODE, PLANNER])
def test_clients_reach_etcd_nats_and_dns(client: Peer) -> None:
    assert connects(client, ETCD, 2379)
    assert connects(client, NATS, 4222)
    assert connects(client, DNS, 53, "UDP")
    assert connects(client, DNS, 53)


def test_job_that_creates_users_reaches_etcd_and_dns_alone() -> None:
    assert connects(ETCD_USERS, ETCD, 2379)
    assert connects(ETCD_USERS, DNS, 53, "UDP")
    assert not connects(ETCD_USERS, ETCD, 2380)
    assert not connects(ETCD_USERS, NATS, 4222)


@each_case("client", [FRONTEND, PREFILL, DECODE, PLANNER, ETCD, NATS, PERF, ETCD_USERS])
@each_case("target", [WORLD, METADATA, STRANGER, NEIGHBOR, PROMETHEUS])
def test_no_process_connects_to_other_hosts(client: Peer, target: Peer) -> None:
    assert not any(connects(client, target, port) for port in (53, 80, 443, 2379, 4222, UCX))


@pytest.mark.parametrize("client", [PERF, DOWNLOAD, STRANGER, NEIGHBOR, WORLD])
def test_others_do_not_reach_etcd_and_nats(client: Peer) -> None:
    for target, ports in ((ETCD, (2379, 2380, 2381)), (NATS, (4222, 6222, 8222))):
        assert not any(is_allowed(target, "Ingress", client, port, "TCP") for port in ports)


@pytest.mark.parametrize("client", [FRONTEND, PREFILL])
def test_clients_do_not_reach_ports_of_members(client: Peer) -> None:
    assert not connects(client, ETCD, 2380)
    assert not connects(client, NATS, 6222)
    assert connects(ETCD, ETCD, 2380)
    assert connects(NATS, NATS, 6222)


def test_kv_goes_between_workers_of_one_deployment() -> None:
    assert connects(DECODE, PREFILL, UCX)
    assert connects(PREFILL, DECODE, UCX)
    assert not connects(peer(f"{OTHER}-decode"), PREFILL, UCX)
    for stranger in (
        FRONTEND,
        PLANNER,
        PERF,
        DOWNLOAD,
        ETCD,
        NATS,
        STRANGER,
        NEIGHBOR,
        WORLD,
        PROMETHEUS,
    ):
        assert not connects(stranger, PREFILL, UCX)


def test_monitoring_ports_are_open_to_prometheus_alone() -> None:
    system = ((PREFILL, 9090), (PLANNER, 9090))
    for target, port in ((ETCD, 2381), (NATS, 8222), *system, (FRONTEND, 8000)):
        assert connects(PROMETHEUS, target, port)
        assert not connects(STRANGER, target, port)


def test_perf_job_reaches_its_frontend_alone() -> None:
    assert connects(PERF, FRONTEND, 8000)
    assert not connects(PERF, PREFILL, 9090)
    assert not connects(STRANGER, PERF, 80)


def test_only_the_download_reaches_the_internet() -> None:
    assert connects(DOWNLOAD, WORLD, 443)
    assert connects(DOWNLOAD, DNS, 53, "UDP")
    assert not connects(DOWNLOAD, WORLD, 80)
    assert not connects(DOWNLOAD, METADATA, 443)
    assert not any(connects(DOWNLOAD, other, 443) for other in (FRONTEND, PREFILL, NEIGHBOR))


def test_every_policy_selects_pods_and_their_ports() -> None:
    there = list(pods(DOCS))
    monitoring = {2381, 8222}
    for doc in POLICIES:
        hit = [pod for pod in there if matches(doc["spec"]["podSelector"], pod.labels)]
        assert hit, name_of(doc)
        open_ports = {
            value
            for pod in hit
            for port in pod.container.get("ports", [])
            for value in (port["name"], port["containerPort"])
        }
        for rule in doc["spec"].get("ingress", []):
            assert {entry["port"] for entry in rule.get("ports", [])} <= open_ports | monitoring


def test_every_pod_has_policies_of_both_directions() -> None:
    for pod in pods(DOCS):
        assert rules(Peer(pod.labels), "Egress") is not None, pod.owner
        assert rules(Peer(pod.labels), "Ingress") is not None, pod.owner
