"""Describe the arguments of each supported release of vLLM.

scripts/vllm_manifest generates a manifest.
"""

from dynamo_trtllm.engines.manifests import LibraryReleases

LIBRARY = LibraryReleases.load(__name__)
