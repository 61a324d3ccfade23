"""Name and read the files of TLS. This module needs no TLS library."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.trusted_file import UntrustedFile, read_trusted

_MAX_BYTES: Final = 1 << 20
_CERTIFICATE: Final = b"-----BEGIN CERTIFICATE-----"
_PRIVATE_KEY: Final = b"PRIVATE KEY-----"


class TlsFiles(NamedTuple):
    """The files of a server, in PEM form."""

    certificate: Path  # with those of intermediate CAs behind it
    key: Path  # its private key, without a passphrase
    client_ca: Path | None = None  # CAs whose certificates clients must present


class ClientTlsFiles(NamedTuple):
    """The files with which a client proves who it is, in PEM form."""

    certificate: Path
    key: Path  # its private key, without a passphrase


def read_pem(path: Path, field: str, *, is_key: bool = False) -> bytes:
    """Return the content of a file with certificates or a private key.

    Args:
        path: the file.
        field: the setting that names it.
        is_key: the file has a private key, which others may not read.

    Raises:
        ConfigError: the file can't be read or trusted, or has something else.
    """
    try:
        data = read_trusted(path, _MAX_BYTES, is_secret=is_key)
    except OSError as exc:
        raise ConfigError(
            f"the TLS file {path} can't be read: {exc.strerror}; correct the path, or change its"
            " permissions",
            field=field,
        ) from exc
    except UntrustedFile as exc:
        raise ConfigError(f"the TLS file {path} {exc.problem}", field=field) from exc
    wanted = "private key" if is_key else "certificate"
    if (_PRIVATE_KEY if is_key else _CERTIFICATE) not in data:
        raise ConfigError(f"the TLS file {path} has no {wanted} in PEM form; pass one", field=field)
    return data
