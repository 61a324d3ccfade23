"""Write files with secrets, and write them again if another program has removed them."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from dynamo_trtllm.protocol.errors import ConfigError


def write_private(path: Path, text: str) -> None:
    """Write a file that only its user may read. If this fails, the path stays as it was.

    Raises:
        ConfigError: the file can't be written.
    """
    temporary = ""
    try:
        # The mode of this file is 0600.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as exc:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise ConfigError(
            f"{path} can't be written: {exc.strerror or exc}; free space, or use another folder"
        ) from exc


class SecretFiles:
    """The files with secrets in the temporary folder of a launcher.

    The processes of a deployment read them at their start, and when they connect again. Programs
    that clean /tmp remove old files, also those of a deployment that has run for weeks.

    Args:
        folder: the folder, which only its user may read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._texts: dict[Path, str] = {}

    def write(self, name: str, text: str) -> Path:
        """Write a file, and return its path.

        Raises:
            ConfigError: the file can't be written.
        """
        path = self.folder / name
        write_private(path, text)
        self.keep(path)
        return path

    def keep(self, path: Path) -> None:
        """Restore this file, too, which is in the folder, if it is removed."""
        self._texts[path] = path.read_text(encoding="utf-8")

    def restore(self) -> None:
        """Write the files again that no longer exist.

        Raises:
            ConfigError: a file can't be written, or the folder belongs to another user by now.
        """
        missing = [path for path in self._texts if not path.exists()]
        if not missing:
            return
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            status = self.folder.lstat()
        except OSError as exc:
            raise ConfigError(
                f"{self.folder} can't be created again: {exc.strerror or exc}; start the"
                " deployment again"
            ) from exc
        # If the folder was removed, another user can have created one with its name.
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise ConfigError(f"{self.folder} belongs to another user; start the deployment again")
        for path in missing:
            write_private(path, self._texts[path])
