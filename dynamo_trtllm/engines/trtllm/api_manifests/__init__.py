"""Describe the known releases of TensorRT-LLM, whose manifests are extracted from their published sources."""

from __future__ import annotations

import copy
import logging
import re

from dynamo_trtllm.engines.manifests import ApiManifest, LibraryReleases
from dynamo_trtllm.errors import ConfigError

_log = logging.getLogger(__name__)

LIBRARY = LibraryReleases.load(__name__)


def release_for(version: str) -> ApiManifest:
    """Return the known release of the same minor line.

    For a newer line, log a warning and return the newest release, of which no part counts as read completely: names
    that it lacks may exist. So keys of 1.4 candidates are passed on, and not rejected as unknown.

    Args:
        version: installed version of TensorRT-LLM.

    Raises:
        ConfigError: the version is older than 1.1 or not a version.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ConfigError(f"Invalid TensorRT-LLM version {version!r}: expected a release such as 1.2.1")
    line = (int(match[1]), int(match[2]))
    lines = {(int(each.name.split(".")[0]), int(each.name.split(".")[1])): each for each in LIBRARY.releases}
    below = [known for known in lines if known <= line]
    if not below:
        raise ConfigError(f"TensorRT-LLM {version} is too old. Install 1.1.0 or newer.")
    release = lines[max(below)]
    if max(below) != line:
        _log.warning(
            "TensorRT-LLM %s is unknown; using the argument schema of %s. Check docs/trtllm.md", version, release.title
        )
        release = copy.copy(release)
        release.not_read |= {f"{owner} in part" for owner in release.owners}
        return release
    if version != release.name:
        _log.info("Using the argument schema of TensorRT-LLM %s for %s", release.title, version)
    return release
