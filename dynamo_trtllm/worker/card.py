"""Make the card of a worker's model: sampling defaults, parsers and files that frontends fetch."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from dynamo_trtllm import models as bundled_models
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.models.checkpoint import CONFIG, TEMPLATE, read_sampling_defaults, renderer_of
from dynamo_trtllm.models.parser_names import PARSERS
from dynamo_trtllm.protocol.errors import ConfigError, InvalidRequest
from dynamo_trtllm.protocol.messages import FileChunk, SamplingDefaults

log = logging.getLogger(__name__)

# Values of sampling parameters that have no effect.
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def sampling_defaults(config: WorkerConfig, model: str) -> SamplingDefaults:
    """Return the sampling defaults for --generation-config. May read generation_config.json.

    Args:
        config: the settings, with `model_path` set to the folder of the model.
        model: --model-path as the user set it, which may be the name of a bundled model.

    Raises:
        ConfigError: the file has an invalid value.
    """
    if config.generation_config == "none":
        return SamplingDefaults()
    bundled = bundled_models.sampling_defaults(model)
    if bundled is not None:
        return bundled
    return read_sampling_defaults(Path(config.model_path))


def without_unsupported(
    defaults: SamplingDefaults, unsupported_features: Collection[str]
) -> SamplingDefaults:
    """Return the defaults without those that the engine does not support, because each request with
    an unsupported field would fail.

    Log a warning about dropped defaults that have an effect.
    """
    dropped = [name for name in defaults.given() if name in unsupported_features]
    effective = [name for name in dropped if getattr(defaults, name) != _NEUTRAL.get(name)]
    if effective:
        text = (
            "generation config: %s ignored, this engine does not support it; --generation-config"
            " none turns all off"
        )
        log.warning(text, ", ".join(effective))
    unset: dict[str, None] = dict.fromkeys(dropped)
    return msgspec.structs.replace(defaults, **unset)


def check_card_flags(config: WorkerConfig, *, reads_model: bool) -> None:
    """Check the flags of parsers and template before the model is loaded.

    Parsers and template must also fit the model. This is checked only if the model's folder shows
    the format of the model.

    Args:
        config: settings with the flags.
        reads_model: True if `model_path` is the model's folder.

    Raises:
        ConfigError: the template can't be read, or a flag does not fit the model, see
            `parser_names` and `with_custom_template`.
    """
    template = config.custom_jinja_template
    if template is not None:
        _check_template(template)
    flags = config.dyn_reasoning_parser, config.dyn_tool_call_parser, template
    if not reads_model or not any(flags):
        return
    config_file = Path(config.model_path) / CONFIG
    try:
        model_type = json.loads(config_file.read_bytes())["model_type"]
    except (OSError, ValueError, TypeError, KeyError):
        # The engine reports an unreadable model.
        return
    renderer = renderer_of(model_type)
    # These calls are made only for their errors. Their results are not needed here.
    parser_names(config, renderer)
    with_custom_template(config, renderer, {})


def _check_template(path: Path) -> None:
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"--custom-jinja-template {path} can't be read: {reason}; pass a file with a chat"
            " template",
            field="custom_jinja_template",
        ) from exc


def with_custom_template(
    config: WorkerConfig, renderer: str, files: Mapping[str, Path]
) -> dict[str, Path]:
    """Return the files that frontends fetch, by their names.

    The template of --custom-jinja-template replaces the template of the model.

    Args:
        config: settings with the flag.
        renderer: "harmony" or "chat_template".
        files: tokenizer and template files of the model.

    Raises:
        ConfigError: the model's format has no template.
    """
    template = config.custom_jinja_template
    if template is None:
        return dict(files)
    if renderer == "harmony":
        raise ConfigError(
            f"--custom-jinja-template {template} has no effect on this model, which uses the"
            " Harmony format; leave the flag out",
            field="custom_jinja_template",
        )
    return {**files, TEMPLATE: template}


def parser_names(config: WorkerConfig, renderer: str) -> dict[str, str]:
    """Return the names of the model's parsers by field of the card.

    Args:
        config: settings with the parser flags.
        renderer: "harmony" or "chat_template".

    Raises:
        ConfigError: a parser does not fit the model's format; the error names the flag.
    """
    names = {}
    for field, known in PARSERS[renderer].items():
        chosen = getattr(config, f"dyn_{field}")
        name = known[0] if chosen is None else chosen
        names[field] = name
        if name not in known:
            flag = f"--dyn-{field.replace('_', '-')}"
            format_name = "the Harmony format" if renderer == "harmony" else "a chat template"
            raise ConfigError(
                f"{flag} {chosen} does not fit this model, which uses {format_name}; choose one of"
                f" {', '.join(known)}, or leave the flag out",
                field=f"dyn_{field}",
            )
    return names


FILE_CHUNK_BYTES = 512 << 10  # less than the default limit of NATS, 1 MiB


def digest(path: Path) -> str:
    """Return the content hash (SHA-256, hexadecimal) with which frontends request a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def file_chunk(files_by_sha256: Mapping[str, Path], sha256: str, offset: int) -> FileChunk:
    """Return a part of one of the card's files.

    Raises InvalidRequest if the worker has no such file.
    """
    path = files_by_sha256.get(sha256)
    if path is None:
        raise InvalidRequest(f"this worker has no file {sha256}", field="sha256")
    total_bytes = path.stat().st_size
    with path.open("rb") as file:
        # A file system may reject very large offsets.
        file.seek(min(offset, total_bytes))
        return FileChunk(data=file.read(FILE_CHUNK_BYTES), total_bytes=total_bytes)
