"""What `kubectl kustomize` makes of our recipes: the features that they use and no others.

Held to the real one by an
`extra` test.
"""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

Doc = dict[str, Any]

_KNOWN = {
    "apiVersion",
    "kind",
    "resources",
    "components",
    "patches",
    "images",
    "replicas",
    "configMapGenerator",
}
_SCALED = ("Deployment", "StatefulSet")
# by which members of lists of objects are distinguished
_MERGE_KEYS = ("name", "mountPath", "containerPort")


# ten times faster, where it was built
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_documents(text: str) -> list[Doc]:
    """Return the documents of a YAML text."""
    return list(yaml.load_all(text, Loader=_LOADER))


@cache
def _read(path: Path) -> tuple[Doc, ...]:
    return tuple(read_documents(path.read_text()))


def documents(path: Path) -> list[Doc]:
    return copy.deepcopy(list(_read(path)))


def render(folder: Path) -> list[Doc]:
    """All objects of a kustomization; names of generated ConfigMaps have no hash."""
    return _apply(folder, [])


def _apply(folder: Path, docs: list[Doc]) -> list[Doc]:
    spec = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(spec) <= _KNOWN, f"{folder}: {set(spec) - _KNOWN} is more than this renderer knows"
    for name in spec.get("resources", []):
        path = folder / name
        docs += render(path) if path.is_dir() else documents(path)
    for name in spec.get("components", []):
        docs = _apply(folder / name, docs)
    for generated in spec.get("configMapGenerator", []):
        _generate(folder, generated, docs)
    for patch in spec.get("patches", []):
        docs = _patched(folder, patch, docs)
    for replicas in spec.get("replicas", []):
        (doc,) = [
            d for d in docs if d["kind"] in _SCALED and d["metadata"]["name"] == replicas["name"]
        ]
        doc["spec"]["replicas"] = replicas["count"]
    for image in spec.get("images", []):
        _rename_image(docs, image)
    return docs


def _generate(folder: Path, spec: Doc, docs: list[Doc]) -> None:
    data = {Path(name).name: (folder / name).read_text() for name in spec["files"]}
    present = [
        d for d in docs if d["kind"] == "ConfigMap" and d["metadata"]["name"] == spec["name"]
    ]
    if spec.get("behavior") == "merge":
        (one,) = present
        one["data"].update(data)
    else:
        assert not present
        docs.append(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": spec["name"]},
                "data": data,
            }
        )


def _patched(folder: Path, patch: Doc, docs: list[Doc]) -> list[Doc]:
    given = yaml.safe_load(
        patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text()
    )
    if "target" in patch:
        kind = patch["target"]["kind"]
        name = re.compile(patch["target"]["name"])
        hit = [d for d in docs if d["kind"] == kind and name.fullmatch(d["metadata"]["name"])]
        if isinstance(given, dict):
            given.pop("metadata", None)  # the target's name counts
    else:
        kind = given["kind"]
        exact = given["metadata"]["name"]
        hit = [d for d in docs if d["kind"] == kind and d["metadata"]["name"] == exact]
    assert hit, f"{folder}: a patch that meets nothing"
    if isinstance(given, list):
        for doc in hit:
            for operation in given:
                _json_patch(doc, operation)
        return docs
    if given.pop("$patch", None) == "delete":
        return [doc for doc in docs if doc not in hit]
    (doc,) = hit
    doc.update(_merged(doc, given))
    return docs


def _json_patch(doc: Doc, operation: Doc) -> None:
    *parents, last = operation["path"].strip("/").split("/")
    at: Any = doc
    for key in parents:
        at = at[int(key)] if isinstance(at, list) else at[key]
    assert last in at, f"{operation['path']} is not there"
    if operation["op"] == "remove":
        del at[last]
    else:
        assert operation["op"] == "replace"
        at[last] = operation["value"]


def _merged(base: Any, patch: Any) -> Any:
    if isinstance(base, dict) and isinstance(patch, dict):
        return base | {key: _merged(base.get(key), value) for key, value in patch.items()}
    if (
        isinstance(base, list)
        and isinstance(patch, list)
        and all(isinstance(item, dict) for item in base + patch)
    ):
        key = next((key for key in _MERGE_KEYS if all(key in item for item in base + patch)), None)
        if key is not None:
            there = {item[key]: item for item in base}
            new = [
                _merged(there.get(item[key]), item)
                for item in patch
                if item.get("$patch") != "delete"
            ]
            return new + [item for item in base if item[key] not in {p[key] for p in patch}]
    return copy.deepcopy(patch)


def _rename_image(node: Any, image: Doc) -> None:
    if isinstance(node, list):
        for item in node:
            _rename_image(item, image)
    elif isinstance(node, dict):
        name, _, tag = str(node.get("image", "")).partition(":")
        if name == image["name"]:
            node["image"] = f"{image.get('newName', name)}:{image.get('newTag', tag)}"
        for item in node.values():
            _rename_image(item, image)
