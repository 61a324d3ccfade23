"""Import an inference library, and define the interface through which an engine uses a library:
calls, results, health and counters.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dynamo_trtllm.engines.engine_interface import EngineInfo
from dynamo_trtllm.engines.external.format_cost import check_cost
from dynamo_trtllm.models.checkpoint import Checkpoint
from dynamo_trtllm.protocol.errors import ConfigError, DynamoError, RequestRejected
from dynamo_trtllm.protocol.messages import (
    Chunk,
    ClientShare,
    FinishReason,
    GenerateRequest,
    KvTransferParams,
    OutputFormat,
    StructuredOutput,
    TokenLogprob,
)

# Finish reasons of the libraries that are successful ends.
ENDS: Mapping[str, FinishReason] = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class Counts(NamedTuple):
    """Counters of the library. A counter that the library does not report is 0."""

    waiting: int = 0  # waiting requests
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0


class ResultReceiver(Protocol):
    """Takes the results of one call. The library's adapter calls it on the event loop."""

    @property
    def is_fetching(self) -> bool:
        """True until the first result of a decode call.

        That result shows that the KV has been fetched.
        """

    def on_result(self, result: Any) -> None:
        """Take the next result. A result with a finish reason ends the call. Never raises."""

    def on_error(self, error: DynamoError) -> None:
        """End the call with an error. Never raises.

        EngineFailed ends all calls if the library is not healthy, or if several requests in a row
        have ended with EngineFailed.
        """


class LibraryCall(Protocol):
    """One call of the library.

    The runner calls `run` once, and the other methods only after that.
    """

    exports_kv: bool  # True for a prefill call whose KV stays allocated for a decode worker
    stop_ids: frozenset[int]  # token ids that end the output
    num_generated: int  # output tokens so far
    # Prompt tokens that came from the prefix cache, as far as the library has reported them.
    cached_tokens: int

    async def run(self, receiver: ResultReceiver) -> None:
        """Submit the call and pass its results to the receiver, in this coroutine or in callbacks.

        Raises:
            DynamoError: the library rejected the call, or the call ended without a finish reason.
                EngineFailed has the effect that `ResultReceiver.on_error` describes.
        """

    def read(self, result: Any) -> tuple[Chunk, str | None]:
        """Return the tokens that a result adds, and the finish reason.

        The runner calls this method once per result, in order.

        The chunk may also have the log-probabilities of the whole prompt. The chunk has no finish
        reason and no timings.
        """

    def phases(self, result: Any) -> dict[str, float]:
        """Return the library's seconds of each phase of this call until its first token.

        The runner calls this method at the first tokens and at the end. The result is empty if the
        library does not report phases.
        """

    def export(self, result: Any, chunk: Chunk) -> tuple[Chunk, bytes]:
        """Return the first token of this prefill call, which has ended, and the engine state that
        the decode worker needs to fetch its KV.

        Raises:
            DynamoError: the library gave nothing to transfer.
        """

    def abort(self) -> None:
        """Ask the library to end the call, without waiting.

        The last result of the call still goes to the receiver.
        """

    def release_kv(self, *, has_expired: bool) -> float | None:
        """Free the KV that this prefill call has exported or would have exported, without waiting.

        Returns:
            None if the library frees the KV now, or holds no KV. A time of `time.monotonic()` if
            the library keeps the KV until then and can't free it earlier. Infinity if the library
            never frees the KV.
        """


class Library(Protocol):
    """A loaded library. The engine shuts the library down after `aclose`."""

    transfer_hint: str  # where to look when the KV of a prompt was not received
    can_abort_fetch: bool  # True if a decode call may be aborted while the library fetches its KV
    keeps_unfetched_kv: bool  # see `EngineInfo.keeps_unfetched_kv`

    def prepare(self, request: GenerateRequest, kv_params: KvTransferParams | None) -> LibraryCall:
        """Check a request and convert it to a call.

        Args:
            request: the request.
            kv_params: KV transfer parameters of a decode request, which match this worker.

        Raises:
            RequestRejected: names the field that is not supported.
            ContextTooLong: the prompt is too long.
            TransferMismatch: the KV transfer parameters are of another release or form.
        """

    def health(self, waiting_since: float | None) -> str:
        """Return why the library can no longer serve; "" if it can.

        Args:
            waiting_since: when the oldest request that still waits for results began, by
                `time.monotonic()`; None if no request waits for results.
        """

    def counts(self, *, is_idle: bool) -> Counts:
        """Return the library's counters, which may be out of date.

        Args:
            is_idle: True if no call runs and no KV transfer is pending.
        """

    async def aclose(self) -> None:
        """End the background work of this adapter. Idempotent."""


def construct(library: str, make: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Construct one of the library's request objects.

    Args:
        library: name of the library, for error texts.
        make: class of the object.
        values: keyword arguments of the class.

    Raises:
        RequestRejected: the library rejected a value. Other exceptions are bugs of the adapter and
            are not caught.
    """
    try:
        return make(**values)
    except (ValueError, AssertionError) as exc:
        raise RequestRejected(f"{library} rejected the request: {exc}") from exc


def token_logprob(library: str, token: int, entry: Any, alternatives: int) -> TokenLogprob:
    """Convert one token's log-probabilities.

    Args:
        library: name of the library, for error texts.
        token: the chosen token id.
        entry: mapping of token id to an object with `logprob` or to a number, or the chosen token's
            number alone.
        alternatives: number of alternatives to return.

    Raises:
        RequestRejected: the mapping lacks the chosen token.
    """
    if not isinstance(entry, Mapping):
        return TokenLogprob(token, float(entry))
    values: dict[int, float] = {}
    for candidate, value in entry.items():
        number = value if isinstance(value, (int, float)) else value.logprob
        values[int(candidate)] = float(number)
    if token not in values:
        raise RequestRejected(
            f"{library} returned no log-probability for a token; omit logprobs", field="logprobs"
        )
    likeliest = sorted(values.items(), key=lambda pair: -pair[1])[:alternatives]
    return TokenLogprob(token, values[token], tuple(likeliest))


# Harmony's stop tokens <|return|> and <|call|>. By default the libraries stop at one of them or at
# neither.
_HARMONY_STOP_IDS = (200002, 200012)


def model_stop_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the model's own stop tokens, the main one first."""
    harmony = _HARMONY_STOP_IDS if checkpoint.renderer == "harmony" else ()
    candidates = (*harmony, *checkpoint.eos_token_ids)
    known = [token_id for token_id in candidates if token_id < checkpoint.vocab_size]
    # This removes duplicates.
    return tuple(dict.fromkeys(known))


def is_plain(guided: StructuredOutput) -> bool:
    """Return True if one format covers the complete output."""
    is_one_form = len(guided.alternatives) == 1 and not guided.alternatives[0].prefix
    return is_one_form and not guided.trigger and guided.otherwise is None


def queue_priority(request: GenerateRequest, info: EngineInfo) -> int:
    """Return the priority of a request in the queue of the library. Lower values come first.

    Of requests of the same priority, those of clients below their share come first. So each
    priority of a request becomes two priorities of the queue. Returns 0, the library's default, if
    the queue is not ordered by priority.
    """
    if "priority" not in info.supported_features:
        return 0
    priority = 2 * request.priority
    if request.client_share is ClientShare.BELOW:
        priority -= 1
    return priority


def guided_params(guided: StructuredOutput) -> dict[str, Any]:
    """Return the arguments of the library's class for guided decoding.

    The arguments are the same in TensorRT-LLM and vLLM. Structural tags follow the format of
    xgrammar's documentation, which both libraries use.

    Raises:
        FormatTooComplex: the library would compile the format for too long.
    """
    check_cost(guided)
    if is_plain(guided):
        only = guided.alternatives[0]
        if only.grammar:
            return {"grammar": only.grammar}
        if only.regex:
            return {"regex": only.regex}
        if only.json_schema == "{}":
            return {"json_object": True}
        return {"json": only.json_schema}
    return {"structural_tag": _structural_tag(guided)}


def _structural_tag(guided: StructuredOutput) -> str:
    """Return the JSON text of a structural tag."""
    if guided.trigger:
        form = _triggered_tags(guided)
    else:
        form = _one_of([_format(alternative) for alternative in guided.alternatives])
    return json.dumps({"type": "structural_tag", "format": form})


def _triggered_tags(guided: StructuredOutput) -> dict[str, Any]:
    """Return a format of free text up to a trigger, followed by exactly one of its alternatives.

    Each `otherwise` adds another trigger with alternatives of its own.
    """
    triggers = []
    tags = []
    part: StructuredOutput | None = guided
    while part is not None:
        trigger = part.trigger
        triggers.append(trigger)
        tags += [_tag(trigger + form.prefix, form) for form in part.alternatives]
        part = part.otherwise
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, "stop_after_first": True}


def _tag(begin: str, alternative: OutputFormat) -> dict[str, Any]:
    return {"begin": begin, "content": _content(alternative), "end": ""}


def _format(alternative: OutputFormat) -> dict[str, Any]:
    if not alternative.prefix:
        return _content(alternative)
    prefix = {"type": "const_string", "value": alternative.prefix}
    return {"type": "sequence", "elements": [prefix, _content(alternative)]}


def _content(alternative: OutputFormat) -> dict[str, Any]:
    if alternative.grammar:
        return {"type": "grammar", "grammar": alternative.grammar}
    if alternative.regex:
        return {"type": "regex", "pattern": alternative.regex}
    # An empty schema means any object, see `guided_params`.
    if alternative.json_schema == "{}":
        schema = {"type": "object"}
    else:
        schema = json.loads(alternative.json_schema)
    return {"type": "json_schema", "json_schema": schema}


def _one_of(forms: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return forms[0] if len(forms) == 1 else {"type": "or", "elements": list(forms)}


def _is_or_contains(package: str | None, module: str) -> bool:
    """Return True if `module` is this package or in it."""
    return f"{module}.".startswith(f"{package}.")


# What a package with compiled libraries raises when it can't be imported.
_IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryPackage:
    """The package of a library.

    Only `load` and `find` import it, which is slow and reads the environment.
    """

    engine: str  # value of `--engine`
    library: str  # name for messages
    releases: str  # supported releases, for messages
    module: str
    distributions: tuple[str, ...]  # each contains the module
    install: str  # how to install it

    def is_installed(self) -> bool:
        """Return True if the package is installed."""
        return importlib.util.find_spec(self.module) is not None

    def version(self) -> str:
        """Return the installed version, without an import if the package metadata is available.

        Raises:
            ConfigError: the package is not installed.
        """
        if not self.is_installed():
            raise self._error(
                f"the {self.engine} engine needs {self.library} {self.releases}; {self.install}"
            )
        for name in self.distributions:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return str(self.load().__version__)

    def load(self, module: str = "") -> Any:
        """Import a module of the package, by default the package itself.

        Raises:
            ConfigError: the import fails.
        """
        try:
            return importlib.import_module(module or self.module)
        except _IMPORT_ERRORS as exc:
            raise self._broken(exc) from exc

    def find(self, name: str, *modules: str) -> Any:
        """Return the object with this name from the first of the modules that has one.

        The module of an object may depend on the release.

        Raises:
            ConfigError: no module has the name, or an import fails.
        """
        value = self.find_optional(name, *modules)
        if value is None:
            where = f"{self.library} has no {name} in {', '.join(modules)}"
            raise self._error(f"{where}; install {self.library} {self.releases}")
        return value

    def find_optional(self, name: str, *modules: str) -> Any:
        """Do the same as `find`, but return None if no module has the name.

        Raises ConfigError if an import fails.
        """
        for module in modules:
            try:
                found = importlib.import_module(module)
            except _IMPORT_ERRORS as exc:
                # The missing module may be one that `module` imports. Then the installation is
                # broken.
                if isinstance(exc, ModuleNotFoundError) and _is_or_contains(exc.name, module):
                    continue  # the release has no such module
                raise self._broken(exc) from exc
            if hasattr(found, name):
                return getattr(found, name)
        return None

    def _broken(self, exc: Exception) -> ConfigError:
        return self._error(
            f"{self.library} can't be imported ({exc}); {self.install}, and check that the"
            " libraries that it loads are found"
        )

    def _error(self, message: str) -> ConfigError:
        return ConfigError(message, field="engine")
