"""What `python -m` starts: Ctrl-C while its modules are read, which takes a while, ends it with no traceback."""

from __future__ import annotations

import runpy
import sys
from importlib.abc import MetaPathFinder

import pytest


class Interrupts(MetaPathFinder):
    """Ctrl-C as soon as this module is looked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == self._name:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("module", "main"),
    [
        ("dynamo_trtllm", "dynamo_trtllm.worker.main"),
        ("dynamo_trtllm.frontend", "dynamo_trtllm.frontend.main"),
        ("dynamo_trtllm.launch", "dynamo_trtllm.launch.main"),
        ("dynamo_trtllm.chat", "dynamo_trtllm.cli.chat"),
        ("dynamo_trtllm.clear_namespace", "dynamo_trtllm.cli.clear_namespace"),
        ("dynamo_trtllm.preflight", "dynamo_trtllm.cli.preflight"),
    ],
)
def test_module_when_interrupted_while_it_loads_then_it_ends_as_one_that_was_interrupted(
    monkeypatch: pytest.MonkeyPatch, module: str, main: str
) -> None:
    monkeypatch.delitem(sys.modules, main, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupts(main), *sys.meta_path])
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    assert isinstance(ended.value, SystemExit)
    assert ended.value.code == 130
