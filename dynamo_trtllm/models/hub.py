"""Find a model of the Hugging Face Hub in the local cache, or download it.

Only the files that engines and frontends read are downloaded.

The library huggingface_hub comes with the extra `hub` and is imported at first use. It reads
HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE and HF_TOKEN.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType
from typing import Any, Final

from dynamo_trtllm.models.checkpoint import (
    CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    WEIGHT_INDEX,
    renderer_of,
)
from dynamo_trtllm.protocol.errors import ConfigError, install_hint

_LOOK_UP_TIMEOUT_S: Final = 10.0
_WEIGHTS: Final = "*.safetensors"
_PART_OF_WEIGHTS: Final = "model-*-of-*.safetensors"
_NEEDED: Final = [_WEIGHTS, "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_NOT_NEEDED: Final = ["*/*", "consolidated*"]  # files with the same weights in other formats
_GIB: Final = 1 << 30
# The names that huggingface_hub gives to progress bars that count bytes. From 1.0 on there is one
# bar for all files, and before 1.0 one bar for each file.
_BARS_OF_BYTES: Final = {
    "huggingface_hub.snapshot_download",
    "huggingface_hub.http_get",
    "huggingface_hub.xet_get",
}

Show = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """One revision of a model. Its folder has at least config.json."""

    name: str
    revision: str  # commit hash
    folder: Path
    weight_bytes: int
    download_bytes: int  # size of the files that are not in the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """A Hugging Face Hub and the local cache of its models.

    Args:
        endpoint: URL of the hub. Default: HF_ENDPOINT, or the public hub.
        cache_dir: cache folder. Default: the cache of huggingface_hub, from HF_HUB_CACHE or
            HF_HOME.
    """

    endpoint: str | None = None
    cache_dir: Path | None = None

    def find(self, name: str, revision: str | None = None) -> HubModel:
        """Return a model. Use no network if the cache has the model.

        Otherwise, look the model up on the Hub, and download its config.json.

        Args:
            name: ORG/NAME.
            revision: branch, tag or commit hash. Default: the main branch.

        Raises:
            ConfigError: there is no such model, access is denied, the hub can't be reached, the
                model has no weights in the safetensors format or lacks a file of its tokenizer, or
                the extra `hub` is not installed.
        """
        if importlib.util.find_spec("huggingface_hub") is None:
            raise ConfigError(
                f"model {name} is on the Hub, which needs huggingface_hub; {install_hint('hub')}",
                field="model",
            )
        cached = self._cached(name, revision)
        if cached is not None:
            return cached
        from huggingface_hub import HfApi, hf_hub_download

        with self._errors(name, revision):
            api = HfApi(endpoint=self.endpoint)
            info = api.model_info(
                name, revision=revision, files_metadata=True, timeout=_LOOK_UP_TIMEOUT_S
            )
            sizes = {
                file.rfilename: file.size or 0
                for file in info.siblings or ()
                if _is_needed(file.rfilename)
            }
            weights = [size for file, size in sizes.items() if fnmatch(file, _WEIGHTS)]
            if CONFIG not in sizes:
                raise _lacks(name, CONFIG)
            if not weights:
                raise _lacks(name, "weights in the safetensors format")
            # This download also stores in the cache which commit the branch or tag refers to, so a
            # later call need not look up the commit.
            config = hf_hub_download(
                name, CONFIG, revision=revision, cache_dir=self.cache_dir, endpoint=self.endpoint
            )
        folder = Path(config).parent
        for file in _tokenizer_files(folder):
            if file not in sizes:
                raise _lacks(name, file)
        missing = [size for file, size in sizes.items() if not (folder / file).exists()]
        return HubModel(
            name=name,
            revision=folder.name,
            folder=folder,
            weight_bytes=sum(weights),
            download_bytes=sum(missing),
        )

    def download(self, model: HubModel, show: Show) -> Path:
        """Download the missing files of a model and return its folder.

        An interrupted download keeps complete files.

        Args:
            model: return value of `find`.
            show: writes a line of progress. On a terminal, progress bars on stderr replace these
                lines.

        Raises:
            ConfigError: the disk has too little space, or the download fails.
        """
        if not model.download_bytes:
            return model.folder
        cache = model.folder.parent
        free = shutil.disk_usage(cache).free
        if free < model.download_bytes:
            raise ConfigError(
                f"downloading {model.name} needs {model.download_bytes / _GIB:.1f} GiB in {cache},"
                f" which has {free / _GIB:.1f} GiB free; free space, or set HF_HOME to a folder on"
                " another disk"
            )
        show(f"downloading {model.name}: {model.download_bytes / _GIB:.1f} GiB to {model.folder}")
        with _stop_on_signals() as is_stopping, self._errors(model.name, model.revision):
            progress = _progress(model.download_bytes, show, is_stopping)
            with _as_bar_of_each_file(progress):
                self._snapshot(model.name, model.revision, tqdm_class=progress)
        return model.folder

    def _cached(self, name: str, revision: str | None) -> HubModel | None:
        """Return the model if the cache has all files that serving needs; otherwise None."""
        from huggingface_hub.errors import LocalEntryNotFoundError

        with self._errors(name, revision):
            try:
                folder = self._snapshot(name, revision, local_files_only=True)
            except LocalEntryNotFoundError:
                return None
            weights = _weight_files(folder)
        # Another program may have downloaded a part of the model.
        if not weights or not all(file.is_file() for file in [*weights, *_other_files(folder)]):
            return None
        return HubModel(
            name=name,
            revision=folder.name,
            folder=folder,
            weight_bytes=sum(file.stat().st_size for file in weights),
            download_bytes=0,
        )

    def _snapshot(self, name: str, revision: str | None, **options: Any) -> Path:
        """Return the folder of the needed files, from the cache or the hub."""
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            name,
            revision=revision,
            cache_dir=self.cache_dir,
            endpoint=self.endpoint,
            allow_patterns=_NEEDED,
            ignore_patterns=_NOT_NEEDED,
            **options,
        )
        return Path(folder)

    @contextmanager
    def _errors(self, name: str, revision: str | None) -> Iterator[None]:
        """Convert errors of huggingface_hub and of its HTTP library to ConfigError."""
        from huggingface_hub import constants
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        known: tuple[type[Any], ...] = (
            HFValidationError,
            RuntimeError,  # an error of hf-xet, with which downloads are faster
            # The disk is full, or there is no network. Before huggingface_hub 1.0, all errors of
            # HTTP, too.
            OSError,
            # From 1.0 on, one of these classes is the base class of the HTTP library's errors.
            *HfHubHTTPError.__bases__,
        )
        try:
            yield
        except BrokenPipeError:  # the reader of this program's output has exited
            raise
        except known as exc:
            reason = _reason(exc, self.endpoint or constants.ENDPOINT, revision)
            raise ConfigError(f"model {name}: {reason}", field="model") from exc


def _lacks(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"model {name} has no {what} at its top level; choose another model or --revision",
        field="model",
    )


def _is_needed(file: str) -> bool:
    if any(fnmatch(file, pattern) for pattern in _NOT_NEEDED):
        return False
    return any(fnmatch(file, pattern) for pattern in _NEEDED)


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files that a folder should have."""
    index = folder / WEIGHT_INDEX
    if index.is_file():
        try:
            file_of_tensor = json.loads(index.read_bytes())["weight_map"]
            return [folder / name for name in sorted(set(file_of_tensor.values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ConfigError(
                f"{index} is no index of weights; remove it, and the model is downloaded again",
                field="model",
            ) from exc
    return sorted(folder.glob(_WEIGHTS))


def _other_files(folder: Path) -> list[Path]:
    """Return the other files that serving the weights of a folder needs."""
    names = [CONFIG, *_tokenizer_files(folder)]
    # Only the index shows which of several weight files are missing.
    if _has_several_parts(folder):
        names.append(WEIGHT_INDEX)
    return [folder / name for name in names]


def _has_several_parts(folder: Path) -> bool:
    """Return whether weight files are parts: `model-00001-of-00002.safetensors`."""
    totals = (path.stem.rpartition("-of-")[2] for path in folder.glob(_PART_OF_WEIGHTS))
    return any(total.isdecimal() and int(total) > 1 for total in totals)


def _tokenizer_files(folder: Path) -> list[str]:
    """Return the names of the files that frontends need to render prompts."""
    try:
        model_type = json.loads((folder / CONFIG).read_bytes())["model_type"]
    except (OSError, ValueError, TypeError, KeyError):
        # The worker reports an unreadable config.json.
        return []
    return [] if renderer_of(model_type) == "harmony" else [TOKENIZER, TOKENIZER_CONFIG]


def _reason(exc: Exception, endpoint: str, revision: str | None) -> str:
    """Return what went wrong, and what to do about it."""
    from huggingface_hub import errors

    match exc:
        case errors.GatedRepoError():
            return (
                f"access is restricted; accept its terms at {endpoint}, and set HF_TOKEN to a token"
                " with access"
            )
        case errors.RepositoryNotFoundError():
            return (
                f"{endpoint} has no such model, or it is private; check the name, or set HF_TOKEN"
            )
        case errors.RevisionNotFoundError():
            return f"there is no revision {revision!r}; pass another --revision, or leave it out"
        case errors.OfflineModeIsEnabled():
            return (
                "it is not in the cache, and HF_HUB_OFFLINE is set; unset it, or pass a model"
                " folder"
            )
        case errors.HFValidationError():
            return f"{exc}; expected ORG/NAME"
        case errors.HfHubHTTPError():
            return (
                f"{endpoint} answered with status {exc.response.status_code}; try again, or pass a"
                " model folder"
            )
        case OSError(strerror=str(text), errno=int()):
            where = f"{exc.filename}: " if exc.filename else ""
            return f"{where}{text}; correct this, or pass a model folder"
    text = " ".join(str(exc).split()) or type(exc).__name__
    return (
        f"{endpoint} can't be reached or broke off ({text}); check the network or HF_ENDPOINT, or"
        " pass a model folder"
    )


@contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """On SIGINT and SIGTERM, set an event and then raise KeyboardInterrupt or SystemExit.

    After the exception, huggingface_hub waits for its threads, which look at the event when they
    receive data. This may take long, so a second signal ends the process at once.
    """
    stopping = threading.Event()

    def stop(number: int, _: FrameType | None) -> None:
        if stopping.is_set():
            os._exit(128 + number)
        stopping.set()
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Progress:
    """Counts the bytes that were downloaded, and writes a line for each tenth of all bytes."""

    def __init__(self, total: int, show: Show) -> None:
        self._total = max(1, total)
        self._show = show
        # Before huggingface_hub 1.0, the thread of each file adds its own bytes.
        self._lock = threading.Lock()
        self._bytes = 0
        self._tenths = 0

    def add(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            tenths = min(10 * self._bytes // self._total, 10)
            if tenths <= self._tenths:
                return
            self._tenths = tenths
            self._show(f"downloaded {10 * tenths}% of {self._total / _GIB:.1f} GiB")


def _progress(total: int, show: Show, is_stopping: threading.Event) -> type[Any]:
    """Return the class of progress bars for huggingface_hub.

    Without a terminal, the class shows no bars, and writes a line for each tenth.

    Args:
        total: bytes to download.
        show: writes a line.
        is_stopping: when set, the downloading threads end.
    """
    from huggingface_hub.utils.tqdm import tqdm

    has_terminal = sys.stderr.isatty()
    progress = _Progress(total, show)

    class Progress(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._is_counted = options.get("name") in _BARS_OF_BYTES
            options["disable"] = not has_terminal
            super().__init__(*args, **options)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            if is_stopping.is_set():
                raise KeyboardInterrupt
            if self._is_counted and not has_terminal and n is not None:
                progress.add(int(n))
            shown: bool | None = super().update(n)
            return shown

    return Progress


@contextmanager
def _as_bar_of_each_file(progress: type[Any]) -> Iterator[None]:
    """Make huggingface_hub use a class for the progress bars of single files.

    Before 1.0, `snapshot_download` uses its `tqdm_class` only to count files, and only the bars of
    single files count bytes. Later releases don't show these bars.
    """
    # An import statement would give the class and not the module, because the package has an
    # attribute `tqdm`, which is the class.
    module: Any = importlib.import_module("huggingface_hub.utils.tqdm")
    original = module.tqdm
    module.tqdm = progress
    try:
        yield
    finally:
        module.tqdm = original
