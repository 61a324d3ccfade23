"""The page "Connect clients" has the lines that tests/clients runs, and "Clients that were tested" the
versions.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from tests.clients.environments import ENVIRONMENTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "connect-clients.md").read_text(encoding="utf-8")
TESTED = (ROOT / "docs" / "clients-tested.md").read_text(encoding="utf-8")
DRIVERS = ROOT / "tests" / "clients" / "drivers"
BLOCK = re.compile(r"<!-- (\S+) (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)
URL = "http://localhost:8000"
MODEL = "tiny-gpt-oss"
# What a driver gets as arguments, and the page has as text.
VALUES = (
    (r'f"\{base_url\}/v1"', f'"{URL}/v1"'),
    (r"(?<==)base_url\b", f'"{URL}"'),
    (r"(?<=[ ,])baseURL,", f'baseURL: "{URL}/v1",'),
    (r"\{ model, ", f'{{ model: "{MODEL}", '),
    (r'f"hosted_vllm/\{model\}"', f'"hosted_vllm/{MODEL}"'),
    (r"(?<=[=(])model(?=[,)])", f'"{MODEL}"'),
    (r"\bMODEL\b", MODEL),
)


def excerpt(driver: str, name: str) -> str:
    """Return the lines between two marks of a driver, as the page shows them."""
    text = (DRIVERS / driver).read_text(encoding="utf-8")
    marks = rf"(?:#|//) docs: {name}\n(.*?)^ *(?:#|//) docs: end"
    found = re.search(marks, text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"{driver} marks no lines as {name}"
    lines = textwrap.dedent(found.group(1)).replace('CONFIG = """\n', "").replace('\n"""\n', "\n")
    for pattern, value in VALUES:
        lines = re.sub(pattern, value, lines)
    return lines.strip()


BLOCKS = BLOCK.findall(PAGE)


@pytest.mark.parametrize(("driver", "name", "block"), BLOCKS, ids=[case[1] for case in BLOCKS])
def test_lines_when_compared_with_the_driver_then_equal(driver: str, name: str, block: str) -> None:
    imports = [line for line in block.splitlines() if line.startswith(("import ", "from "))]
    source = (DRIVERS / driver).read_text(encoding="utf-8")
    if "subprocess" in source and "CONFIG" not in source:  # the page has a line of a shell
        options = re.findall(r"--[\w-]+", block)
        assert options
        assert [option for option in options if f'"{option}"' not in excerpt(driver, name)] == []
        return
    assert [line for line in imports if not has_import(source, line)] == []
    rest = [line for line in block.strip().splitlines() if line not in imports]
    assert "\n".join(rest).strip() == excerpt(driver, name)


def has_import(source: str, line: str) -> bool:
    """Return whether a driver imports these names, perhaps beside others."""
    names = line.removeprefix("from ").partition(" import ")
    module = names[0]
    listed = names[2].split(", ")
    if not names[1] or line.endswith(";"):
        return f"{line}\n" in source
    found = re.search(rf"^from {re.escape(module)} import (.*)$", source, re.MULTILINE)
    return found is not None and set(listed) <= set(found[1].split(", "))


def test_page_shows_every_marked_excerpt() -> None:
    marked = set()
    for path in DRIVERS.iterdir():
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        names = re.findall(r"(?:#|//) docs: ([\w-]+)", text)
        marked |= {(path.name, name) for name in names if name != "end"}
    assert {(driver, name) for driver, name, _ in BLOCK.findall(PAGE)} == marked


def test_versions_of_tested_clients_equal_the_pins() -> None:
    pins = {
        pin.replace("==", " ") for environment in ENVIRONMENTS.values() for pin in environment.pins
    }
    pins = {re.sub(r"\[\w+\]", "", pin) for pin in pins}
    listed = set(re.findall(r"^\| `([^`]+)` \|", TESTED, re.MULTILINE))
    assert pins - {"zod@4.6.7"} == listed
