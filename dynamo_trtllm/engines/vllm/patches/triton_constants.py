"""Compile two kernels of mixtures of experts once, instead of once per 32 tokens of a step.

Two kernels of triton_kernels 3.5.1, which vLLM 0.24 to 0.33 contain unchanged, take the number of
tokens, rounded up to 32, as a constant. Triton compiles a kernel anew for each value of its
constants, in the middle of serving.
"""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from typing import NamedTuple

from dynamo_trtllm.engines.vllm.patches.patch import Patch, apply

PATCH = Patch(
    name="triton_constants",
    fault=(
        "gpt-oss on Hopper compiles two kernels for every 32 tokens of a step, while requests wait"
    ),
    upstream="https://github.com/vllm-project/vllm/issues/49349",
    needed_in="all, with the triton_kernels that vLLM contains",
    detection="the kernel's source has the constant",
    goes="when the bundled triton_kernels take an ordinary argument",
    is_vital=False,
)


class FixedArgument(NamedTuple):
    """A constant argument of a Triton kernel, each of whose values is compiled anew."""

    user: str  # module whose launches use the kernel
    kernel: str
    constant: str
    # Arguments for which Triton must not compile separate code for multiples of 16, because the
    # code would be the same.
    unspecialized: tuple[str, ...]


FIXED = (
    FixedArgument("triton_kernels.topk", "_topk_forward", "stride_rn", ("n_rows", "n_rows_pad")),
    FixedArgument(
        "triton_kernels.reduction_details.reduce_bitmatrix",
        "_sum_bitmatrix_rows",
        "stride_bn",
        ("shape_bm", "stride_pn", "shape_pn"),
    ),
)


def install() -> None:
    """Replace the kernels of FIXED in this process, if the triton_kernels in use contain them."""
    has_kernels = importlib.import_module("vllm.utils.import_utils").has_triton_kernels
    if has_kernels():
        for fixed in FIXED:
            # Newer releases of vLLM accept other versions of triton_kernels, which may have neither
            # of these kernels.
            apply(PATCH, partial(has_kernel, fixed), partial(replace, fixed))


def has_kernel(fixed: FixedArgument) -> bool:
    """Return whether the kernel exists and has the constant."""
    try:
        kernel = getattr(importlib.import_module(fixed.user), fixed.kernel)
    except (ImportError, AttributeError):
        return False
    return inspect.getsource(kernel.fn).count(f"{fixed.constant}: tl.constexpr") == 1


def replace(fixed: FixedArgument) -> None:
    """Replace a Triton kernel by the same one with an ordinary argument in place of the constant.

    Raises:
        ImportError: there is no such module.
        AttributeError: the module has no such kernel.
    """
    user = importlib.import_module(fixed.user)
    kernel = getattr(user, fixed.kernel)
    source = inspect.getsource(kernel.fn)
    define = importlib.import_module("triton_kernels.specialize").define_kernel
    names = inspect.signature(kernel.fn).parameters
    attributes = {"do_not_specialize": [name for name in fixed.unspecialized if name in names]}
    scope = {
        name: value for name, value in kernel.fn.__globals__.items() if not name.startswith("__")
    }
    changed = source.replace(f"{fixed.constant}: tl.constexpr", fixed.constant)
    setattr(user, fixed.kernel, define(changed, user, attributes, **scope))
