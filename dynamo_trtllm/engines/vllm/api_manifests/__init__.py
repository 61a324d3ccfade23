"""Describe the arguments of the supported release of vLLM. scripts/vllm_manifest generates its manifest."""

from dynamo_trtllm.engines.manifests import LibraryReleases

LIBRARY = LibraryReleases.load(__name__)
VERSION = next(iter(LIBRARY.manifests))
