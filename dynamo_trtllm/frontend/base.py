"""What the HTTP edge needs of the rest of a frontend, as protocols: a pipeline to run and models to choose from."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Protocol

from dynamo_trtllm.messages import Chunk, GenerateRequest, Instance

if TYPE_CHECKING:
    from dynamo_trtllm.frontend.models import ServedModel
    from dynamo_trtllm.frontend.pipeline import Trace
    from dynamo_trtllm.frontend.standing import Standing


class Generates(Protocol):
    def generate(self, request: GenerateRequest, trace: Trace) -> AsyncGenerator[Chunk, None]:
        """Both legs. Consume with `aclosing`; closing it cancels both. Fills `trace` as workers answer."""
        ...


class Catalog(Protocol):
    def get(self, name: str) -> ServedModel:
        """Raises ModelNotFound."""
        ...

    def names(self) -> list[str]: ...

    def instances(self) -> Sequence[Instance]: ...

    def lacking(self, name: str) -> str | None:
        """Why the model can't be served now, for people; None: it can."""
        ...

    def standing(self) -> Standing:
        """All pairs of all models, and the instances that fit no other."""
        ...
