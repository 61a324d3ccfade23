"""deploy/docker-compose.yml and what it mounts: nothing open, all pinned, and names of metrics that
exist.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_trtllm.cluster.roles import cluster_users, nats_configuration
from dynamo_trtllm.config.commands import RolesConfig
from dynamo_trtllm.config.load import load
from dynamo_trtllm.launch.local_servers import nats_binary
from dynamo_trtllm.observability.metrics import PREFIX, TABLE
from tests.kit.cases import each_case

DEPLOY = Path(__file__).parents[3] / "deploy"
RECIPES = DEPLOY / "recipes" / "platform"
COMPOSE = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
DASHBOARD = json.loads((DEPLOY / "compose/grafana/dashboards/dynamo.json").read_text())


def test_services_profile_is_for_metrics_only() -> None:
    plain = {name for name, service in SERVICES.items() if "profiles" not in service}
    metrics = {name for name, service in SERVICES.items() if service.get("profiles") == ["metrics"]}
    assert plain == {"etcd", "nats"}
    assert metrics == {"prometheus", "grafana", "nats-exporter", "dcgm-exporter"}


@each_case("name", SERVICES)
def test_service_when_read_then_pinned_supervised_and_closed(name: str) -> None:
    service = SERVICES[name]
    image, _, tag = service["image"].partition(":")
    assert image
    assert re.match(r"v?\d+\.\d+\.\d+", tag)
    assert "latest" not in tag
    assert service["restart"] == "unless-stopped"
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]  # and the default seccomp profile
    if name != "dcgm-exporter":
        assert "cap_add" not in service
        assert service["read_only"] is True
        assert not service["user"].startswith("0:")
    # the exporter's image has nothing that could ask
    assert service["healthcheck"].get("disable", False) is (name == "dcgm-exporter")
    if not service["healthcheck"].get("disable"):
        assert service["healthcheck"]["test"][0] == "CMD"
    for port in service["ports"]:
        assert port.startswith("${BIND_ADDRESS:-127.0.0.1}:")


def test_files_when_mounted_then_they_are_there_or_made() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source, target, *mode = volume.split(":")
            if not source.startswith("./"):
                assert source in COMPOSE["volumes"]
                continue
            if source.startswith("./compose/data/"):  # deploy/make_secrets creates those
                assert (target, mode) == ("/data", [])
                continue
            assert target.startswith("/")
            assert mode == ["ro"]
            if not source.startswith("./compose/secrets/"):  # deploy/make_secrets writes those
                assert (DEPLOY / source).exists()


def test_container_state_is_in_volumes() -> None:
    for name in ("etcd", "nats"):
        assert f"./compose/data/{name}:/data" in SERVICES[name]["volumes"]
    for name in ("prometheus", "grafana"):
        assert any(volume.split(":")[0] == f"{name}-data" for volume in SERVICES[name]["volumes"])


def test_etcd_when_any_client_asks_then_it_wants_a_certificate() -> None:
    command = SERVICES["etcd"]["command"]
    assert "--client-cert-auth" in command
    assert all(
        word.partition("=")[2].startswith("https://") for word in command if "client-urls" in word
    )
    major, minor = re.findall(r"\d+", SERVICES["etcd"]["image"].rpartition(":")[2])[:2]
    assert (int(major), int(minor)) >= (3, 5)
    # metrics need no certificate
    assert not any("2381" in port for port in SERVICES["etcd"]["ports"])


@pytest.mark.parametrize("folder", [DEPLOY / "compose", RECIPES / "base"], ids=lambda x: x.name)
def test_nats_takes_the_user_from_the_certificate(folder: Path) -> None:
    text = (folder / "nats.conf").read_text()
    assert "verify_and_map: true" in text
    assert "include ./nats-users.conf" in text
    assert "jetstream" in text


def test_users_of_nats_are_those_of_roles_in_compose() -> None:
    """`dynamo-trtllm roles nats > deploy/compose/nats-users.conf` writes them."""
    written = (DEPLOY / "compose" / "nats-users.conf").read_text()
    assert written == nats_configuration(cluster_users(["dynamo"]))


def test_users_of_nats_and_etcd_are_for_all_recipes() -> None:
    """`dynamo-trtllm roles nats` with the flags of the Job writes them."""
    (job,) = yaml.safe_load_all((RECIPES / "base" / "etcd-users.yaml").read_text())
    words = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert words[:3] == ["dynamo-trtllm", "roles", "etcd"]
    config = load(RolesConfig, prog="p", argv=words[2:], environ={})
    deployments = {
        name
        for path in (DEPLOY / "recipes").rglob("*.yaml")
        for name in re.findall(r"name: DYN_NAMESPACE, value: ([\w-]+)", path.read_text())
    }
    assert deployments == set(config.other_namespaces)
    users = cluster_users([config.namespace, *config.other_namespaces])
    assert (RECIPES / "base" / "nats-users.conf").read_text() == nats_configuration(users)


def test_passwords_when_not_set_then_compose_refuses() -> None:
    assert SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"].startswith(
        "${GRAFANA_PASSWORD:?"
    )


@pytest.mark.parametrize(
    ("folder", "name"),
    [("compose", "nats.conf"), ("platform/base", "nats.conf"), ("platform", "cluster.conf")],
)
def test_nats_configuration_when_read_by_nats_server_then_valid(
    folder: str, name: str, tmp_path: Path
) -> None:
    """A password that begins with a digit, or a variable that is not set, would be an error
    here.
    """
    subprocess.run(
        [DEPLOY / "make_secrets", "compose", "--folder", tmp_path], check=True, capture_output=True
    )
    made = tmp_path / "compose" / "secrets"
    folders = (
        [DEPLOY / "compose"]
        if folder == "compose"
        else [RECIPES / "base", RECIPES / "overlays/production"]
    )
    for source in folders:
        for path in source.glob("*.conf"):
            text = path.read_text().replace("/data", str(tmp_path)).replace("/tls/", f"{made}/")
            (tmp_path / path.name).write_text(text.replace("/tls.", "/server."))
    environ = {"NATS_ROUTE_PASSWORD": "p0", "POD_NAME": "nats-0"}
    environ |= {f"ROUTE_{i}": f"nats://route:p0@nats-{i}.nats-headless:6222" for i in range(3)}
    command = [nats_binary(), "-t", "-c", tmp_path / name]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environ
    )
    assert done.returncode == 0, done.stderr
    if name != "cluster.conf":
        return
    del environ["NATS_ROUTE_PASSWORD"]
    without = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environ
    )
    assert "NATS_ROUTE_PASSWORD" in without.stderr + without.stdout


def test_prometheus_scrapes_every_service_and_our_ports() -> None:
    config = yaml.safe_load((DEPLOY / "compose/prometheus.yml").read_text())
    targets = {
        t
        for job in config["scrape_configs"]
        for s in job.get("static_configs", [])
        for t in s["targets"]
    }
    assert targets == {"etcd:2381", "nats-exporter:7777", "dcgm-exporter:9401"}
    assert {target.partition(":")[0] for target in targets} <= set(SERVICES)
    ours = yaml.safe_load((DEPLOY / "compose/targets/local.yml").read_text())
    assert {service["labels"]["process"] for service in ours} == {"frontend", "worker"}
    assert SERVICES["prometheus"]["extra_hosts"] == ["host.docker.internal:host-gateway"]


def _queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def test_dashboard_uses_existing_metrics() -> None:
    """Histograms have series of their own; a misspelled name shows an empty panel and no error."""
    exist: set[str] = set()
    for row in TABLE:
        name = PREFIX + row.name
        exist |= (
            {f"{name}_{part}" for part in ("bucket", "sum", "count")}
            if row.kind == "histogram"
            else {name}
        )
    used = {name for query in _queries() for name in re.findall(rf"{PREFIX}\w+", query)}
    assert used <= exist
    # and it leaves out none that clients or operators would look for
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    assert {PREFIX + row.name for row in TABLE} <= shown


def test_dashboard_uses_existing_labels() -> None:
    labels = {label for row in TABLE for label in row.labels} | {
        "le",
        "role",
        "instance",
        "job",
        "process",
    }
    for query in _queries():
        groups = {
            word.strip()
            for group in re.findall(r"by \(([^)]*)\)", query)
            for word in group.split(",")
        }
        assert groups <= labels
        assert set(re.findall(r"[{,](\w+)\s*(?:=|!=|=~|!~)", query)) <= labels


def test_dashboard_source_and_panels_are_complete() -> None:
    source = yaml.safe_load(
        (DEPLOY / "compose/grafana/provisioning/datasources/prometheus.yml").read_text()
    )
    (uid,) = [datasource["uid"] for datasource in source["datasources"]]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in DASHBOARD["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == uid
            assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
