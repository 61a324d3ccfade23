"""scripts/release --dry-run, in a repository of three files. What contributors read is true."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dynamo_trtllm import __version__

ROOT = Path(__file__).parents[2]
CHANGELOG = """# Changelog

## [Unreleased]

## [1.2.3] - 2026-01-31

### Added
- A thing.

## [1.2.2] - 2026-01-01
- Old.
"""


class Repository:
    """A repository whose HEAD can be released as v1.2.3."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "scripts").mkdir()
        (folder / "dynamo_trtllm").mkdir()
        shutil.copy(ROOT / "scripts/release", folder / "scripts")
        (folder / "dynamo_trtllm/__init__.py").write_text('"""Text."""\n\n__version__ = "1.2.3"\n')
        (folder / "CHANGELOG.md").write_text(CHANGELOG)
        self.git("init", "--quiet")
        self.commit()

    def git(self, *words: str) -> None:
        who = [
            "-c",
            "user.name=test",
            "-c",
            "user.email=test@localhost",
            "-c",
            "commit.gpgsign=false",
        ]
        subprocess.run(["git", *who, *words], cwd=self.folder, check=True, capture_output=True)

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "text")

    def replace(self, file: str, old: str, new: str) -> None:
        text = (self.folder / file).read_text()
        assert old in text
        (self.folder / file).write_text(text.replace(old, new))
        self.commit()

    def release(self, tag: str = "v1.2.3") -> tuple[int, str, str]:
        command = [sys.executable, self.folder / "scripts/release", tag, "--dry-run"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_dry_run_prints_entries_and_builds_nothing(repository: Repository) -> None:
    status, said, errors = repository.release()
    assert (status, errors) == (0, "")
    assert "- A thing." in said
    assert "- Old." not in said
    for name in (
        "dynamo_trtllm-1.2.3-py3-none-any.whl",
        "dynamo_trtllm-1.2.3.tar.gz",
        "sbom.cdx.json",
        "THIRD_PARTY_LICENSES.txt",
        "SHA256SUMS",
    ):
        assert f"  {name}\n" in said
    assert not (repository.folder / "dist").exists()


@pytest.mark.parametrize("tag", ["1.2.3", "v1.2", "v1.2.3rc1", "release-1.2.3"])
def test_tag_when_it_has_another_form_then_it_is_rejected(repository: Repository, tag: str) -> None:
    assert repository.release(tag) == (1, "", f"release: {tag} is not a tag of the form v0.0.0\n")


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("dynamo_trtllm/__init__.py", "1.2.3", "1.2.2", "is 1.2.2; set it to 1.2.3"),
        (
            "CHANGELOG.md",
            "## [1.2.3] - 2026-01-31",
            "## [1.2.3]",
            "has no section '## [1.2.3] - YYYY-MM-DD'",
        ),
        (
            "CHANGELOG.md",
            "### Added\n- A thing.\n",
            "",
            "has no section '## [1.2.3] - YYYY-MM-DD' with entries",
        ),
        (
            "CHANGELOG.md",
            "## [Unreleased]\n",
            "## [Unreleased]\n- More.\n",
            "has entries under [Unreleased]",
        ),
    ],
)
def test_commit_with_files_that_do_not_fit_the_tag_is_rejected(
    repository: Repository, file: str, old: str, new: str, says: str
) -> None:
    repository.replace(file, old, new)
    status, said, errors = repository.release()
    assert (status, said) == (1, "")
    (line,) = errors.splitlines()
    assert says in line


def test_tree_when_a_file_is_not_committed_then_it_is_named(repository: Repository) -> None:
    (repository.folder / "new.txt").write_text("text")
    status, _, errors = repository.release()
    assert status == 1
    assert "?? new.txt" in errors


def test_tag_on_another_commit_is_rejected(repository: Repository) -> None:
    repository.git("tag", "v1.2.3")
    assert repository.release()[0] == 0
    repository.commit()
    assert repository.release() == (1, "", "release: the tag v1.2.3 exists, on another commit\n")


PAGES = ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")


@pytest.mark.parametrize("page", PAGES)
def test_page_links_and_scripts_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    named = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    named += re.findall(r"(?:scripts|\.ci|docs|constraints)/[\w.-]*", text)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_supported_version_follows_the_minor_version() -> None:
    assert f"({'.'.join(__version__.split('.')[:2])})" in (ROOT / "SECURITY.md").read_text()


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github/ISSUE_TEMPLATE").iterdir()), ids=lambda path: path.stem
)
def test_issue_template_when_read_then_it_is_a_form(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.stem != "config":
        assert {"name", "description", "body"} <= form.keys()
        ids = [part["id"] for part in form["body"]]
        assert len(ids) == len(set(ids))
