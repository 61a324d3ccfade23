"""Import `tensorrt_llm` and bind the names that the engine uses, with the differences between
releases.

Importing this module does not import TensorRT-LLM; `TrtllmBindings` does.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dynamo_trtllm.engines.external.library import LibraryPackage, construct
from dynamo_trtllm.engines.manifests import ApiManifest, Presence
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY, release_for
from dynamo_trtllm.engines.trtllm.requests import TrtllmRequest
from dynamo_trtllm.protocol.errors import ConfigError

log = logging.getLogger(__name__)

PACKAGE = LibraryPackage(
    engine="trtllm",
    library="TensorRT-LLM",
    releases="1.1.0 or newer",
    module="tensorrt_llm",
    distributions=("tensorrt_llm",),
    install=(
        "pip install tensorrt-llm on a machine with NVIDIA GPUs, or run in NVIDIA's TensorRT-LLM"
        " container"
    ),
)

# Classes that not all releases have, by name: the parameter of `generate_async` that takes an
# object of the class, and the module of the class (executor/request.py and llmapi/llm.py, main at
# 00043967).
_PARAMS: Mapping[str, tuple[str, str]] = {
    "SchedulingParams": ("scheduling_params", "tensorrt_llm.scheduling_params"),
    "ConversationParams": ("conversation_params", "tensorrt_llm.conversation_params"),
}

_READ_S = 0.3  # time of one read of reports in 1.1, which queues reports at about this interval
_NEVER_S = 1e6  # a timeout that never passes

# Arguments that `LLM` takes as dictionaries only from 1.3 on. In earlier releases, the key that
# names the class of the argument is a ClassVar: a dictionary with this key fails, and for a
# dictionary without this key, the first class that fits is used (DecodingBaseConfig and
# BaseSparseAttentionConfig in llmapi/llm_args.py of 1.2).
_OBJECTS = ("speculative_config", "sparse_attention_config")


class TrtllmBindings:
    """The bound classes of TensorRT-LLM, and what the installed release supports.

    The classes are untyped, because the package may not be installed for type checks.
    """

    def __init__(self) -> None:
        """Import the package, which takes seconds. Environment variables must be set before.

        Raises:
            ConfigError: the package can't be imported or lacks a needed name.
        """
        self.version = str(PACKAGE.load().__version__)
        # The classes by name; None for a class that the release lacks.
        self.classes = {
            name: PACKAGE.find(name, *modules) for name, modules in LIBRARY.modules.items()
        }
        # The names that the installed package has, by owner: a class, or a method of one.
        has = {
            owner: _names(owner, self.classes) for owner in {**LIBRARY.needed, **LIBRARY.optional}
        }
        check_needed(has, self.version)
        self.parameters = has["LLM.generate_async"]
        self.has_kv_cache_capacity = "get_kv_cache_capacity" in has["LLM"]
        for name, (parameter, module) in _PARAMS.items():
            self.classes[name] = (
                PACKAGE.find_optional(name, module) if parameter in self.parameters else None
            )
        self.classes["Logprob"] = PACKAGE.find_optional("Logprob", "tensorrt_llm.executor.result")
        used = {*LIBRARY.needed["DisaggregatedParams"], *LIBRARY.optional["DisaggregatedParams"]}
        self.disagg_fields = has["DisaggregatedParams"] & used
        release = release_for(self.version)
        self.release = release.name  # the release of the manifest
        # Results report reused prompt tokens; structural tags have the form {"format": …}.
        self.is_since_1_2 = not release.name.startswith("1.1")
        # `LLM` takes the arguments of _OBJECTS as dictionaries.
        self.is_since_1_3 = not release.name.startswith(("1.1", "1.2"))
        _note_differences(release, has)

    def healthy(self, llm: Any) -> bool:
        """Return False if the executor is shut down. True does not prove that it responds."""
        # trtllm-serve uses this private method, too.
        return bool(llm._check_health()) if hasattr(llm, "_check_health") else True

    def recorded_failure(self, llm: Any) -> str:
        """Return the error with which the executor has died, as text; "" if none is recorded.

        Does not block.

        `healthy` would block: if the executor has failed, it shuts the executor down in the
        caller's thread, and sends to its ranks.

        The 1.3 candidates record the error in `_fatal_error` (pull request 12718 of TensorRT-LLM;
        Dynamo reads it, too). Earlier releases put the errors of their threads and ranks, and
        nothing else, into a queue, which the next call reads (`mpi_done_callback` in
        executor/proxy.py, 1.0 to 1.2).
        """
        executor = getattr(llm, "_executor", None)
        if executor is None:
            return ""  # the engine was shut down on request
        if hasattr(executor, "_fatal_error"):
            error = executor._fatal_error
        else:
            waiting = getattr(getattr(executor, "_error_queue", None), "queue", ())
            error = next(iter(waiting), None)  # the error stays in the queue
        if error is not None:
            return f"{type(error).__name__}: {error}"
        if getattr(executor, "doing_shutdown", False):
            return "it is shutting down after an error"
        return ""

    def has_argument(self, config: str, name: str) -> bool:
        """Return True if the installed package has an argument in a configuration class, such as
        `KvCacheConfig`.

        This is for arguments that only some candidates of one release have, because no manifest
        says which candidates.
        """
        found = PACKAGE.find_optional(config, "tensorrt_llm.llmapi", "tensorrt_llm.llmapi.llm_args")
        return name in getattr(found, "model_fields", ())

    def create_llm(self, values: Mapping[str, Any]) -> Any:
        """Return an LLM whose shutdown does not block an event loop.

        If the executor has failed, TensorRT-LLM shuts the executor down in the thread that makes
        the next call or reads the next result. Here this is the event loop's thread. The shutdown
        waits for all ranks, and waits for ever if a rank is lost
        (`GenerationExecutor._handle_background_error` in executor/executor.py, `shutdown` in
        executor/proxy.py, 1.1 to main).

        Args:
            values: arguments of `LLM`.
        """
        llm = self.classes["LLM"](**values)
        # All releases have this private attribute. LLM._check_health uses it, too.
        executor = getattr(llm, "_executor", None)
        if executor is not None:
            executor.shutdown = _off_event_loop(executor.shutdown)
        return llm

    def reader(self, llm: Any, name: str) -> Callable[..., Sequence[Mapping[str, Any]]]:
        """Return a blocking function that reads what the LLM has reported since the last call.

        The blocking functions of 1.1 read until nothing comes within the timeout, so they do not
        return under load. When they return, they lose what they have read: their queue then returns
        None, which is parsed as JSON (`get_results` in executor/result.py and `_SyncQueue.get` in
        llmapi/utils.py).

        So with 1.1 the asynchronous functions are read for a limited time. The blocking functions
        must then never be called, because the queue would refuse later reads by the asynchronous
        functions (`AsyncQueue.get`). The timeout of the asynchronous functions must never pass:
        after it, they return nothing until the next request is submitted.

        Args:
            llm: the LLM, whose calls are made on the running event loop.
            name: `get_stats` or `get_kv_cache_events`.
        """
        if self.is_since_1_2:
            read: Callable[..., Sequence[Mapping[str, Any]]] = getattr(llm, name)
            return read
        loop = asyncio.get_running_loop()
        iterate = getattr(llm, f"{name}_async")

        async def rows(timeout: float) -> list[Mapping[str, Any]]:
            found: list[Mapping[str, Any]] = []
            with suppress(TimeoutError):
                async with asyncio.timeout(min(timeout, _READ_S)) as limit:
                    async for row in iterate(timeout=_NEVER_S):
                        found.append(row)
                        # `wait_for` of Python 3.11, which the queue uses, drops the cancel of the
                        # time limit if a row comes at the same time.
                        if limit.expired():
                            break
                        # Queued rows are returned without a wait. Let other tasks run in between.
                        await asyncio.sleep(0)
            return found

        return lambda timeout: asyncio.run_coroutine_threadsafe(rows(timeout), loop).result()

    def engine_arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `LLM`, with objects in place of dictionaries that the release
        can't take.

        TensorRT-LLM's own function converts the dictionaries, as in trtllm-serve and Dynamo.

        Raises:
            ConfigError: TensorRT-LLM rejected a dictionary.
        """
        given = {
            name: copy.deepcopy(values[name])
            for name in _OBJECTS
            if isinstance(values.get(name), Mapping)
        }
        if not given or self.is_since_1_3:
            return dict(values)
        modules = ("tensorrt_llm.llmapi.llm_utils", "tensorrt_llm.llmapi.llm_args")
        convert = PACKAGE.find("update_llm_args_with_extra_dict", *modules)
        try:
            return {**values, **convert({}, given)}
        except (ValueError, TypeError, KeyError, AssertionError) as exc:
            names = ", ".join(given)
            raise ConfigError(
                f"TensorRT-LLM {self.version} rejected {names}: {exc}", field=next(iter(given))
            ) from exc

    def arguments(
        self, call: TrtllmRequest, disagg: Mapping[str, Any] | None, *, vocab_size: int
    ) -> dict[str, Any]:
        """Return keyword arguments of `generate_async`; its positional order depends on the
        release.

        Args:
            call: the call, without library objects.
            disagg: arguments of DisaggregatedParams; None for an aggregated call.
            vocab_size: length of the logit-bias tensor.

        Raises:
            RequestRejected: a class of the library rejected a value.
        """
        sampling = dict(call.sampling)
        if call.guided is not None:
            sampling["guided_decoding"] = self._make("GuidedDecodingParams", call.guided)
        if call.bias:
            sampling["embedding_bias"] = _bias(call.bias, vocab_size)
        keywords = {**call.keywords, "sampling_params": self._make("SamplingParams", sampling)}
        if disagg is not None:
            keywords["disaggregated_params"] = self._make("DisaggregatedParams", disagg)
        if call.dp_rank is not None and self.classes["SchedulingParams"] is not None:
            keywords["scheduling_params"] = self._make("SchedulingParams", call.dp_rank)
        if call.conversation_id is not None and self.classes["ConversationParams"] is not None:
            conversation = {"conversation_id": call.conversation_id}
            keywords["conversation_params"] = self._make("ConversationParams", conversation)
        if call.trace_headers is not None and "trace_headers" in self.parameters:
            keywords["trace_headers"] = call.trace_headers
        return keywords

    def _make(self, name: str, values: Mapping[str, Any]) -> Any:
        return construct(PACKAGE.library, self.classes[name], values)


def check_needed(has: Mapping[str, frozenset[str]], version: str) -> None:
    """Check that the installed package has every name of `needed`.

    Args:
        has: names of the installed package, by owner.
        version: installed version, for the error text.

    Raises:
        ConfigError: lists the missing names.
    """
    lacking = [
        f"{owner}.{name}"
        for owner, names in LIBRARY.needed.items()
        for name in names
        if name not in has[owner]
    ]
    if lacking:
        raise ConfigError(
            f"TensorRT-LLM {version} lacks names that the engine needs: {', '.join(lacking)}; "
            "install a supported release (docs/trtllm.md) or a newer dynamo_trtllm",
            field="engine",
        )


def release_line(version: str) -> str:
    """Return the minor line of a release ("1.2" for "1.2.1"), or the full version of a
    pre-release.
    """
    version = version.partition("+")[0]
    major, minor, *rest = version.split(".")
    final = all(part.isdigit() for part in rest)
    return f"{major}.{minor}" if final else version


def _note_differences(release: ApiManifest, has: Mapping[str, frozenset[str]]) -> None:
    """Log optional names for which the installed package differs from the manifest.

    The engine uses what the package has.
    """
    for owner, names in LIBRARY.optional.items():
        if release.is_in_part(owner):  # the manifest describes the owner of another release
            continue
        for name in names:
            in_manifest = release.presence(owner, name)
            if in_manifest is Presence.NOT_READ:
                continue
            is_installed = name in has[owner]
            if is_installed is not (in_manifest is Presence.PRESENT):
                state = "has" if is_installed else "lacks"
                log.warning(
                    "TensorRT-LLM %s %s %s.%s, unlike the published release; check the"
                    " installation",
                    release.name,
                    state,
                    owner,
                    name,
                )


def _off_event_loop(shutdown: Callable[[], None]) -> Callable[[], None]:
    """Return a function that runs `shutdown` in the caller's thread. If that thread runs an event
    loop, the function starts another thread for it.
    """
    lock = threading.Lock()

    def run() -> None:
        with lock:
            shutdown()

    def run_in_thread() -> None:
        try:
            run()
        except Exception as exc:  # noqa: BLE001 - the error that caused the shutdown is reported
            log.warning("TensorRT-LLM failed to shut down after an error: %s", exc)

    def guarded() -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            run()
        else:
            threading.Thread(
                target=run_in_thread, name="trtllm-error-shutdown", daemon=True
            ).start()

    return guarded


def _bias(bias: tuple[tuple[int, float], ...], vocab_size: int) -> Any:
    import torch  # comes with TensorRT-LLM

    tensor = torch.zeros(vocab_size, dtype=torch.float32)
    for token, value in bias:
        tensor[token] += value
    return tensor


def _names(owner: str, found: Mapping[str, Any]) -> frozenset[str]:
    """Return the parameters of a method, or the constructor parameters and attributes of a
    class.
    """
    cls, _, method = owner.partition(".")
    if method:
        return frozenset(inspect.signature(getattr(found[cls], method)).parameters)
    return frozenset(inspect.signature(found[cls]).parameters) | frozenset(dir(found[cls]))
