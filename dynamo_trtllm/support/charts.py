"""Draw charts as SVG. Each color has its own line style or marker, for printing."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
DASHES: Final = ("-", "--", "-.", ":")
_MARKERS: Final = ("o", "s", "^", "D", "v", "x")
HATCHES: Final = ("", "///", "...", "xxx", "\\\\\\")
_PACKAGE: Final = "matplotlib"
_STYLE: Final[Any] = {
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "dynamo_trtllm",
}


def can_draw() -> bool:
    """Return whether the package that draws is installed."""
    return importlib.util.find_spec(_PACKAGE) is not None


def line_style(index: int) -> dict[str, Any]:
    """Return the color, dashes and marker of the line with this number."""
    return {
        "color": COLORS[index % len(COLORS)],
        "ls": DASHES[index % len(DASHES)],
        "marker": _MARKERS[index % len(_MARKERS)],
    }


def svg(draw: Callable[[Figure], None], *, width: float = 7.0, height: float = 3.0) -> str:
    """Return a chart as SVG. Equal charts are equal texts.

    Args:
        draw: draws it.
        width: in inches.
        height: in inches.

    Raises:
        ImportError: `can_draw` is false.
    """
    # Only commands with charts need it, and importing it takes most of a second.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
