"""Fuzz one target.

`python -m tests.fuzz.fuzz_process TARGET FOLDER EXECUTIONS [arguments of libFuzzer]`: EXECUTIONS is
the number of new inputs, or 0 for no limit. The folder has inputs to begin with, and gets those that reach more. The process ends at the first
finding. libFuzzer then writes the input to a file.
"""

from __future__ import annotations

import logging
import random
import sys
from pathlib import Path
from typing import Any

import atheris
import msgspec

from tests.fuzz import mutations
from tests.fuzz.growth import InputTimes, check_growth
from tests.fuzz.registry import load
from tests.fuzz.target import Form, Target, random_of

_GROWTH_EVERY = 256  # inputs
_BYTES_SHARE = 0.3  # of mutations of inputs with a structure that change bytes regardless of it


class _Checker:
    """Runs a target with each input, and with larger variants of some."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._times = InputTimes(target)
        self._count = 0

    def __call__(self, data: bytes) -> None:
        self._times.run(data)
        self._count += 1
        if self._count % _GROWTH_EVERY == 0:
            check_growth(self._target, data, random_of(data))


class _Mutator:
    """Mutates inputs that have a structure, and the bytes of some."""

    def __init__(self, target: Target) -> None:
        self._form = target.form
        self._words: list[Any] = [word.decode("utf-8", "replace") for word in target.words]
        if self._form is Form.MESSAGE_PACK:
            self._words += target.words

    def __call__(self, data: bytes, max_size: int, seed: int) -> bytes:
        draw = random.Random(seed)
        if draw.random() < _BYTES_SHARE:
            return atheris.Mutate(data, max_size)
        try:
            value = mutations.read(data, self._form)
            mutated = mutations.write(mutations.mutate(value, self._words, draw), self._form)
        except (ValueError, TypeError, OverflowError, RecursionError, msgspec.DecodeError):
            return atheris.Mutate(data, max_size)
        return mutated if len(mutated) <= max_size else atheris.Mutate(data, max_size)


def main() -> None:
    """Fuzz the target of the command line."""
    name, folder, executions, *arguments = sys.argv[1:]
    logging.disable(logging.WARNING)  # rejected inputs are logged, and formatting takes time
    with atheris.instrument_imports(include=["dynamo_trtllm"]):
        target = load(name)
    for number, data in enumerate(target.seeds()):
        Path(folder, f"seed-{number:04}").write_bytes(data)
    arguments.append(f"-max_len={target.max_bytes}")
    if int(executions):
        # libFuzzer also counts the inputs to begin with, and an empty one.
        num_first = 1 + sum(1 for _ in Path(folder).iterdir())
        arguments.append(f"-runs={num_first + int(executions)}")
    if target.words:
        dictionary = Path(folder).with_name("dictionary")
        dictionary.write_text("".join(f'"{_quoted(word)}"\n' for word in target.words))
        arguments.append(f"-dict={dictionary}")
    mutator = {} if target.form is Form.BYTES else {"custom_mutator": _Mutator(target)}
    atheris.Setup([name, *arguments, folder], _Checker(target), **mutator)
    atheris.Fuzz()


def _quoted(word: bytes) -> str:
    """Return a word in the format of libFuzzer's dictionaries."""
    return "".join(f"\\x{byte:02x}" for byte in word)


if __name__ == "__main__":
    main()
