"""Import a library that an engine wraps: find whether and in which version it is installed, and bind its names."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import Any

from dynamo_trtllm.errors import ConfigError

# What a package with compiled libraries raises when it can't be imported.
_IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryPackage:
    """The package of a library. Only `load` and `find` import it, which is slow and reads the environment."""

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
            raise self._error(f"the {self.engine} engine needs {self.library} {self.releases}; {self.install}")
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
        """Return a name of the first module that has it; its place depends on the release.

        Raises:
            ConfigError: no module has the name, or an import fails.
        """
        value = self.find_optional(name, *modules)
        if value is None:
            where = f"{self.library} has no {name} in {', '.join(modules)}"
            raise self._error(f"{where}; install {self.library} {self.releases}")
        return value

    def find_optional(self, name: str, *modules: str) -> Any:
        """Return the same, but None if no module has the name. Raises ConfigError if an import fails."""
        for module in modules:
            try:
                found = importlib.import_module(module)
            except _IMPORT_ERRORS as exc:
                if not isinstance(exc, ModuleNotFoundError) or not f"{module}.".startswith(f"{exc.name}."):
                    raise self._broken(exc) from exc
                continue  # the release has no such module
            if hasattr(found, name):
                return getattr(found, name)
        return None

    def _broken(self, exc: Exception) -> ConfigError:
        return self._error(
            f"{self.library} can't be imported ({exc}); {self.install}, and check that the libraries that it loads are "
            "found"
        )

    def _error(self, message: str) -> ConfigError:
        return ConfigError(message, field="engine")
