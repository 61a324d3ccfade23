"""Imports NIXL without torch."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from unittest import mock


def import_nixl() -> None:
    """Import NIXL, and let it not import torch, which takes 3 s of CPU time.

    NIXL reads the release of CUDA from torch to choose one of its builds. Where torch has none, it
    is imported in vain, and NIXL takes the build that is installed.
    """
    if "torch" in sys.modules or "nixl" in sys.modules:
        return
    try:
        import nixl_meta_utils
    except ImportError:  # NIXL is not installed, or chooses otherwise
        return
    with (
        suppress(ImportError),  # none of its builds is installed
        mock.patch.object(nixl_meta_utils, "detect_cuda_major", return_value=None),
    ):
        importlib.import_module("nixl")
