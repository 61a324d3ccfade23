"""scripts/release on this commit, without a network: what a release contains."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from dynamo_trtllm import __version__

ROOT = Path(__file__).parents[2]
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
LOCKED = re.compile(r"^([a-z0-9-]+)==", re.MULTILINE)
# Locked for other systems than Linux
NOT_INSTALLED = {"colorama", "httpx2-jsfetch"}


def released(folder: Path) -> Path:
    """Release this commit from a clone, and return the folder of the release."""
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run([*git, "clone", "--quiet", ROOT, folder], check=True)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    changelog = folder / "CHANGELOG.md"
    heading = f"## [Unreleased]\n\n## [{__version__}] - 2026-01-31"
    changelog.write_text(changelog.read_text().replace("## [Unreleased]", heading, 1))
    subprocess.run([*git, "commit", "--quiet", "--all", "-m", "release"], cwd=folder, check=True)
    environ = os.environ | NO_NETWORK | {name.upper(): url for name, url in NO_NETWORK.items()}
    command = ["scripts/release", f"v{__version__}"]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist" / f"v{__version__}"


@pytest.mark.extra
@pytest.mark.timeout(600)  # it reads metadata of all packages, and builds twice
def test_release_without_network_names_every_license(tmp_path: Path) -> None:
    folder = released(tmp_path / "clone")
    sums = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert sums == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name != "SHA256SUMS"
    }
    components = json.loads((folder / "sbom.cdx.json").read_text())["components"]
    assert all(component["licenses"][0]["license"]["name"] for component in components)
    named = {component["name"] for component in components}
    locks = [ROOT / "constraints" / name for name in ("demo.txt", "frontend.txt", "bench.txt")]
    locked = {name for lock in locks for name in LOCKED.findall(lock.read_text())}
    assert named == locked - NOT_INSTALLED | {"torch"}
    texts = (folder / "THIRD_PARTY_LICENSES.txt").read_text()
    sections = re.findall(r"^={80}\n(\S+).*\nLicense: .+$", texts, re.MULTILINE)
    assert set(sections) == named
    assert "Apache License" in texts
