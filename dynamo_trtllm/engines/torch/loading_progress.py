"""Say how many weights are loaded, through the progress bars of transformers.

The module imports no torch, so that a worker can show progress while it imports the library.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final

IMPORTING: Final = "importing transformers"
LOADING: Final = "loading weights"
_BAR_OF_WEIGHTS: Final = "Loading"  # the description of a progress bar of weights begins with this


class LoadingProgress:
    """How far the load of a model is. One thread writes it, others may read it.

    Attributes:
        text: the progress in a few words; "" when nothing is being loaded.
    """

    def __init__(self) -> None:
        self.text = ""

    @contextmanager
    def following(self, library: Any) -> Iterator[None]:
        """Follow the weights that are loaded in this context.

        Args:
            library: `transformers.utils.logging`. Releases before 5 have no `set_tqdm_hook`; with
                them, the text has no percentage.
        """
        self.text = LOADING
        set_hook = getattr(library, "set_tqdm_hook", None)
        previous = None if set_hook is None else set_hook(self._make_bar)
        try:
            yield
        finally:
            if set_hook is not None:
                set_hook(previous)

    def _make_bar(
        self, bar: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Make the library's own progress bar. If the bar is one of weights, `text` follows it."""
        is_of_weights = str(keywords.get("desc", "")).startswith(_BAR_OF_WEIGHTS)
        if is_of_weights and args and isinstance(args[0], Collection):
            args = (self._counting(args[0]), *args[1:])
        return bar(*args, **keywords)

    def _counting(self, items: Collection[Any]) -> Iterator[Any]:
        for number, item in enumerate(items):
            self.text = f"{LOADING} {100 * number // len(items)}%"
            yield item
