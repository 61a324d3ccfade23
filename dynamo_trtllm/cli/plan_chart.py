"""Draw the goodput of all topologies by rate (`dynamo-trtllm plan --plot`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from dynamo_trtllm.simulate.topologies import Cell, crossover
from dynamo_trtllm.support.charts import line_style, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH: Final = 9.0  # inches
_HEIGHT: Final = 3.6


def goodput_chart(cells: Sequence[Cell], limits: dict[str, str]) -> str:
    """Return a chart as SVG: a panel for each definition of a good request.

    Each topology has a line with the range of its simulations. A vertical line shows the least rate
    at which a split is clearly better than aggregated workers, if there is one.

    Args:
        cells: all topologies at all rates.
        limits: the limits of each definition, as text.
    """

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(limits), sharey=True, squeeze=False)[0]
        for axes, (definition, text) in zip(panels, limits.items(), strict=True):
            _draw_panel(axes, cells, definition)
            axes.set(title=text, xlabel="requests/s of the deployment")
        panels[0].set(ylabel="good requests/s per GPU", ylim=(0, None))
        panels[0].legend(fontsize=7)

    return svg(draw, width=_WIDTH, height=_HEIGHT)


def _draw_panel(axes: Axes, cells: Sequence[Cell], definition: str) -> None:
    names = list(dict.fromkeys(str(cell.topology) for cell in cells))
    for index, name in enumerate(names):
        line = [cell for cell in cells if str(cell.topology) == name]
        figures = [cell.goodput[definition] for cell in line]
        below = [figure.mean - figure.low for figure in figures]
        above = [figure.high - figure.mean for figure in figures]
        axes.errorbar(
            [cell.rate for cell in line],
            [figure.mean for figure in figures],
            yerr=[below, above],
            capsize=2,
            label=name,
            **line_style(index),
        )
    rate = crossover(cells, definition)
    if rate is not None:
        axes.axvline(rate, color="gray", lw=0.8)
        axes.annotate(
            f"split better from {rate:g}/s",
            (rate, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(3, -10),
            textcoords="offset points",
            fontsize=7,
        )
