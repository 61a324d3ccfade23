"""Describe the known releases of TensorRT-LLM, whose manifests are extracted from their published
sources.
"""

from __future__ import annotations

import logging
import re

from dynamo_trtllm.engines.manifests import ApiManifest, LibraryReleases
from dynamo_trtllm.protocol.errors import ConfigError

log = logging.getLogger(__name__)

LIBRARY = LibraryReleases.load(__name__)

_FINAL = 10**6  # the number of a final release, after those of all its candidates


def release_for(version: str) -> ApiManifest:
    """Return the API of a version: its own API, or else that of the nearest known release.

    A final release stands for all final releases of its minor line. Release candidates differ in
    arguments and values. So if the nearest known release is a candidate, it counts as read in part:
    arguments that it lacks may exist, and are passed on. The newest release stands for newer lines,
    and counts as read in part for them, too.

    Args:
        version: installed version of TensorRT-LLM, such as 1.2.1, 1.3.0rc29 or 1.2.1+cu130.

    Raises:
        ConfigError: the version is older than 1.1 or not a version.
    """
    line = _line(version)
    candidate = _candidate(version)
    known = [_line(release.name) for release in LIBRARY.releases if _line(release.name) <= line]
    if not known:
        raise ConfigError(f"TensorRT-LLM {version} is too old. Install 1.1.0 or newer.")
    releases = [release for release in LIBRARY.releases if _line(release.name) == max(known)]
    if max(known) != line:
        nearest = releases[-1].as_nearest()
        log.warning(
            "TensorRT-LLM %s is unknown; using the argument schema of %s. Check docs/trtllm.md",
            version,
            nearest.title,
        )
        return nearest
    release = min(releases, key=lambda release: abs(_candidate(release.name) - candidate))
    if release.name == version.partition("+")[0]:
        return release
    if _candidate(release.name) != _FINAL:
        release = release.as_nearest()
    log.info("Using the argument schema of TensorRT-LLM %s for %s", release.title, version)
    return release


def _line(version: str) -> tuple[int, int]:
    """Return the minor line of a version: (1, 3) for 1.3.0rc29.

    Raises ConfigError if the text is not a version.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ConfigError(
            f"Invalid TensorRT-LLM version {version!r}: expected a release such as 1.2.1"
        )
    return int(match[1]), int(match[2])


def _candidate(version: str) -> int:
    """Return the number of a release candidate: 29 for 1.3.0rc29; _FINAL for a final release."""
    match = re.search(r"rc(\d+)", version)
    return int(match[1]) if match else _FINAL
