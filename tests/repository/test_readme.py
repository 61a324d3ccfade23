"""The README is short, and its links, pictures and figures are those of the repository."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from scripts.figures import IMAGES, RECORDING, THEMES, pages, with_figures

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_when_measured_then_it_is_short() -> None:
    assert len(README.splitlines()) <= 130


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_figures_equal_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert with_figures(text, pages()[page]) == text


def test_pictures_when_named_then_both_themes_are_there() -> None:
    named = re.findall(r"docs/images/([\w-]+)-(?:light|dark)\.svg", README)
    assert named
    assert [
        name for name in named for theme in THEMES if not (IMAGES / f"{name}-{theme}.svg").is_file()
    ] == []


def test_scripts_when_named_then_they_are_there_and_executable() -> None:
    named = set(re.findall(r"\./(scripts/\w+)", README))
    assert named == {"scripts/demo", "scripts/test"}
    assert all((ROOT / name).stat().st_mode & 0o111 for name in named)


def test_links_when_relative_then_they_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)[)#]", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_recorded_terminal_shows_what_was_printed() -> None:
    picture = IMAGES / "failover-demo.svg"
    assert picture.stat().st_size < 300_000
    assert f"docs/images/{picture.name}" in README
    events = RECORDING.read_text(encoding="utf-8").splitlines()[1:]
    printed = re.sub(r"\x1b\[[\d;?]*\w", "", "".join(json.loads(event)[2] for event in events))
    drawn = [
        "".join(element.itertext()).strip()
        for element in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")
    ]
    _title, *lines = drawn
    assert len(lines) > 30
    assert [line for line in lines if line not in printed] == []
    assert any(line.startswith("✓ the same text") for line in lines)
