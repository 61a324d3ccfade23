"""argv and the environment are read in one module and written in one module; this walks the source
to hold it.
"""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "dynamo_trtllm"
READER = "config/load.py"
WRITER = "config/environ.py"
# Other modules run these files in processes of their own, with arguments that no user types.
PROGRAMS = {"engines/torch/trial_process.py", "observability/output_relay.py"}
SOURCES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
WRITING_CALLS = {"pop", "update", "setdefault", "clear", "popitem", "putenv", "unsetenv"}


def accesses(text: str) -> list[tuple[int, str]]:
    """(line, "read" or "write") of each use of os.environ, os.getenv, os.putenv, sys.argv, however
    imported.
    """
    found = []
    tree = ast.parse(text)
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "sys"):
            names = {alias.name for alias in node.names}
            if names & {"environ", "environb", "getenv", "putenv", "unsetenv", "argv"}:
                found.append((node.lineno, "read"))
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            continue
        name = f"{node.value.id}.{node.attr}"
        if name in ("os.putenv", "os.unsetenv"):
            found.append((node.lineno, "write"))
        elif name in ("os.environ", "os.environb", "os.getenv", "sys.argv", "sys.orig_argv"):
            found.append((node.lineno, "write" if is_write(node, parents) else "read"))
    return found


def is_write(node: ast.Attribute, parents: dict[ast.AST, ast.AST]) -> bool:
    parent = parents[node]
    if isinstance(parent, ast.Subscript):
        return isinstance(parent.ctx, ast.Store | ast.Del)
    if isinstance(parent, ast.Attribute):
        return parent.attr in WRITING_CALLS
    return isinstance(node.ctx, ast.Store | ast.Del)


@pytest.mark.parametrize("source", SOURCES)
def test_only_config_reads_argv_and_environment(source):
    text = (PACKAGE / source).read_text(encoding="utf-8")
    kinds = {kind for _, kind in accesses(text)} if re.search("env|argv", text) else set()
    if source == READER:
        assert kinds == {"read"}
    elif source == WRITER:
        assert "write" in kinds
    elif source in PROGRAMS:
        assert kinds == {"read"}
        assert text.count("sys.argv") == 1
        assert "os.environ" not in text
    else:
        assert not kinds


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("import os\nos.environ['A'] = '1'", "write"),
        ("import os\ndel os.environ['A']", "write"),
        ("import os\nos.environ.update(A='1')", "write"),
        ("import os\nos.putenv('A', '1')", "write"),
        ("import os\nos.environ['A']", "read"),
        ("import os\nos.getenv('A')", "read"),
        ("from os import environ", "read"),
        ("import sys\nsys.argv[1:]", "read"),
        ("def f():\n    import os\n    return dict(os.environ)", "read"),
    ],
)
def test_accesses_when_a_source_touches_them_then_it_is_seen(text, kind):
    assert [found for _, found in accesses(text)] == [kind]
