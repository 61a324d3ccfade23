"""deploy/container/install_beside, run as Containerfile.trtllm runs it, on the packages that an
image has.

tests/repository/test_requirements.py has the same for all releases, with a resolver alone.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.kit.package_index import RELEASES, pip_environment, project, write_image, write_index

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "deploy" / "container" / "install_beside"
(RELEASE,) = [release for release in RELEASES if release["version"] == "1.2.1"]
# Stands in for the image's Python: its packages are those of PYTHONPATH, not those of this machine.
# They include pip, because Python takes 8 s of CPU time to unpack its own.
PYTHON = """#!/bin/bash
if [[ "$*" == "-m venv --system-site-packages "* ]]; then
    exec {python} -m venv --without-pip "${{@:4}}"
fi
exec {python} "$@"
"""


def install(folder: Path, own: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
    """Install this project's wheel into `folder`/venv, beside the packages of the image."""
    wheels = folder / "wheels"
    image = folder / "image"
    wheels.mkdir()
    write_index(wheels, own)
    write_image(image, RELEASE)
    add_pip(image)
    python = folder / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    base_constraints = folder / "base.txt"
    # NVIDIA's base images have such a file, for their own build
    base_constraints.write_text("pydantic==2.1\n")
    environment = pip_environment() | {
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "PYTHONPATH": str(image),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_CONSTRAINT": str(base_constraints),
    }
    (wheel,) = wheels.glob("dynamo_trtllm-*.whl")
    command = [str(SCRIPT), str(folder / "venv"), str(wheel)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def add_pip(image: Path) -> None:
    pip = importlib.metadata.distribution("pip")
    for name in ("pip", f"pip-{pip.version}.dist-info"):
        (image / name).symlink_to(Path(str(pip.locate_file(name))))


def installed(folder: Path) -> set[str]:
    """Return the names of the packages in the virtual environment itself."""
    found = (folder / "venv").glob("lib/python*/site-packages/*.dist-info")
    return {path.name.split("-")[0].replace("_", "-") for path in found}


def test_install_beside_an_image_adds_only_missing_packages(tmp_path: Path) -> None:
    done = install(tmp_path, project())
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"dynamo-trtllm", "nats-py", "fastokens"} <= installed(tmp_path)
    assert installed(tmp_path) & {*RELEASE["image"], RELEASE["name"]} == set()


def test_install_that_would_replace_a_package_fails(tmp_path: Path) -> None:
    own = project()
    own["dependencies"] = [
        "pydantic>=2.14" if text.startswith("pydantic") else text for text in own["dependencies"]
    ]
    done = install(tmp_path, own)
    assert done.returncode == 1
    assert "pydantic==2.13.3" in done.stdout + done.stderr
    assert done.stderr.endswith(
        "can't be installed beside the packages of this image; see pip's message above\n"
    )
    assert installed(tmp_path) == set()
