"""What a worker says while transformers loads weights."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from dynamo_trtllm.engines.torch.loading_progress import LoadingProgress


class Library:
    """The hook of transformers 5."""

    def __init__(self) -> None:
        self.hook: Callable[..., Any] | None = None

    def set_tqdm_hook(self, hook: Callable[..., Any] | None) -> Callable[..., Any] | None:
        previous = self.hook
        self.hook = hook
        return previous

    def tqdm(self, *args: Any, **keywords: Any) -> Any:
        def bar(items: Any, **_: Any) -> Any:
            return items

        return bar(*args, **keywords) if self.hook is None else self.hook(bar, args, keywords)


def test_percentage_follows_the_bar_of_weights() -> None:
    library = Library()
    progress = LoadingProgress()
    with progress.following(library):
        assert progress.text == "loading weights"
        said = [progress.text for _ in library.tqdm(["a", "b", "c"], desc="Loading weights")]
        assert said == ["loading weights 0%", "loading weights 33%", "loading weights 66%"]
        assert list(library.tqdm(["x"], desc="Fetching files")) == ["x"]
    assert library.hook is None


def test_release_without_a_hook_has_no_percentage() -> None:
    progress = LoadingProgress()
    with progress.following(SimpleNamespace()):
        assert progress.text == "loading weights"
