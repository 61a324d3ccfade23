"""The documentation builds as a site with every link leading somewhere, and names only what there
is.
"""

import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
import yaml

from dynamo_trtllm.observability.metrics import PREFIX, TABLE, Metric
from dynamo_trtllm.protocol.errors import DynamoError
from scripts import metrics_reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "dynamo_trtllm"
MAX_PAGES = 27
MAX_WORDS = 2500
WRITTEN_BY_SCRIPTS = {
    "preflight.md",
    "preflight-vllm.md",
    "reference-configuration.md",
    "reference-metrics.md",
    "reference-python.md",
    "reference-rejected-fields.md",
}
HISTOGRAM_ENDS = ("", "_bucket", "_sum", "_count")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


class Loads(HTMLParser):
    """An HTML parser that collects what a browser loads for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        wanted = {"script": "src", "img": "src", "link": "href"}.get(tag)
        self.addresses += [value for name, value in attrs if name == wanted and value]


def test_site_has_every_page_and_loads_nothing_external(site: Path) -> None:
    pages = {path.stem for path in DOCS.glob("*.md")}
    assert pages <= {path.stem for path in site.glob("*.html")}
    for path in site.glob("*.html"):
        loads = Loads()
        loads.feed(path.read_text(encoding="utf-8"))
        assert loads.addresses
        assert [address for address in loads.addresses if re.match(r"(\w+:)?//", address)] == []


def test_tables_have_a_style_that_wraps_long_code(site: Path) -> None:
    for path in site.glob("*.html"):
        loads = Loads()
        loads.feed(path.read_text(encoding="utf-8"))
        assert [address for address in loads.addresses if address.endswith(".css")][-1].lstrip(
            "./"
        ) == "site.css"
    assert "overflow-wrap: anywhere" in (site / "site.css").read_text()


def test_navigation_when_read_then_it_has_each_page_once() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = re.findall(r"[\w-]+\.md", str(settings["nav"]))
    for_contributors = settings["not_in_nav"].replace("/", "").split()
    pages = sorted(path.name for path in DOCS.glob("*.md"))
    assert sorted(named + for_contributors) == pages


def pages_of_users() -> list[Path]:
    """Return the pages in the navigation, without those that a script writes."""
    nav = str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    named = re.findall(r"[\w-]+\.md", nav)
    return [DOCS / name for name in named if name not in WRITTEN_BY_SCRIPTS]


def test_navigation_has_few_pages_that_users_read() -> None:
    assert len(pages_of_users()) <= MAX_PAGES


@pytest.mark.parametrize("page", pages_of_users(), ids=lambda path: path.stem)
def test_page_that_users_read_is_short(page: Path) -> None:
    assert len(page.read_text().split()) <= MAX_WORDS


def codes(of: type[DynamoError] = DynamoError) -> set[str]:
    return {of.code}.union(*(codes(error) for error in of.__subclasses__()))


def test_troubleshooting_names_existing_findings_and_codes() -> None:
    text = " ".join((DOCS / "troubleshooting.md").read_text().split())
    rules = set(
        re.findall(r"^\| `([a-z-]+)` \|", (DOCS / "preflight.md").read_text(), re.MULTILINE)
    )
    headings = re.findall(r"^### (.*)", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    lists = re.findall(r"findings (?:are )?((?:`[a-z-]+`(?:, | and |[ ;.]))+)", text)
    listed = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", " ".join([*headings, *lists])))
    assert len(listed) > 20
    assert listed <= rules
    named = set(re.findall(r"codes? `(\w+)`", text)) | set(
        re.findall(r"code `\w+` or `(\w+)`", text)
    )
    assert len(named) >= 4
    assert named <= codes()


# What Dynamo's guides say under troubleshooting, by the words in which the page says it.
GUIDES_ADVICE = {
    "Questions": (),
    "CUDA out of memory": ("lower `--max-num-tokens`", "`free_gpu_memory_fraction` is too high"),
    "Installation": (),
    "The worker does not start": (
        "expected format",
        "`CUDA_VISIBLE_DEVICES` does not fit",
        "other processes use the GPUs",
        "Another process uses port 8000",
    ),
    "Workers do not connect": (
        "etcd or NATS does not run",
        "network between the containers",
        "workers of only one role are listed",
    ),
    "Clients are rejected": (),
    "Performance": (
        "`nvidia-smi`",
        "one line per request",
        "`max_batch_size` is larger",
        "chunked prefill",
    ),
    "Containers": ("Container Toolkit", "restart the daemon", "the disk is full"),
    "Repetition, or an answer that does not stop": ('`"top_p": 1`',),
    "Hangs": (),
}


def test_troubleshooting_has_every_row_of_the_guides() -> None:
    sections = (DOCS / "troubleshooting.md").read_text().split("\n## ")[1:]
    parts = (section.partition("\n") for section in sections)
    texts = {title: " ".join(text.split()) for title, _, text in parts}
    assert list(texts) == list(GUIDES_ADVICE)
    assert [
        line
        for title, advice in GUIDES_ADVICE.items()
        for line in advice
        if line not in texts[title]
    ] == []


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda path: path.stem)
def test_page_when_it_names_a_metric_then_there_is_one(page: Path) -> None:
    ends = (*HISTOGRAM_ENDS, "_total")
    known = {PREFIX + metric.name.removesuffix("_total") + end for metric in TABLE for end in ends}
    named = set(re.findall(rf"\b({PREFIX}[a-z_]+)", page.read_text()))
    assert {name for name in named if not name.endswith("_")} <= known


def test_page_of_metrics_when_written_again_then_as_committed() -> None:
    page = (DOCS / "reference-metrics.md").read_text(encoding="utf-8")
    assert metrics_reference.page() == page, "run scripts/docs"


def test_page_of_metrics_prefers_the_meaning_to_the_help_text() -> None:
    metric = Metric(process="worker", name="x", kind="gauge", help="Long", meaning="more [x](a.md)")
    assert metrics_reference.row(metric) == ("`dynamo_trtllm_x`", "gauge", "", "More [x](a.md)")
    assert metrics_reference.row(msgspec.structs.replace(metric, meaning=""))[-1] == "Long"


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda path: path.stem)
def test_page_names_only_existing_files(page: Path) -> None:
    named = set(
        re.findall(
            r"`(?:\./)?((?:scripts|deploy|examples|tests|benchmarks)/[\w./-]+)[` :]",
            page.read_text(),
        )
    )
    # by deploy/make_secrets, never committed
    made = {name for name in named if "/secrets/" in name}
    made |= {"deploy/.env", "deploy/compose/data/"}
    assert [name for name in named - made if not (ROOT / name).exists()] == []
    packages = "|".join(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    in_package = set(re.findall(rf"`((?:{packages})/[\w./-]+)`", page.read_text()))
    assert [name for name in in_package if not (PACKAGE / name).exists()] == []


def test_install_lines_take_no_package_from_an_index() -> None:
    """It is on none: a stranger may take its name there."""
    texts = [ROOT / "README.md", *DOCS.glob("*.md")]
    texts += [
        path
        for folder in ("dynamo_trtllm", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ]
    wrong = re.compile(r"""pip install (?:-\S+ )*['"]?dynamo[-_]trtllm""")
    assert [str(path.relative_to(ROOT)) for path in texts if wrong.search(path.read_text())] == []


def activated(text: str) -> list[bool]:
    """Return, for each command that needs our Python, whether the page has activated an environment
    by then.
    """
    found = []
    is_active = False
    for language, block in re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL):
        if language not in ("bash", "sh", ""):
            continue
        for line in block.splitlines():
            is_active = is_active or bool(re.search(r"source \.venv(-gpu)?/bin/activate", line))
            if re.match(r" *(\w+=\S+ )*(python -m|dynamo-trtllm|etcd|nats-server)\b", line):
                found.append(is_active)
    return found


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda path: path.stem
)
def test_page_activates_environment_before_our_python(page: Path) -> None:
    assert all(activated(page.read_text()))


def test_extras_named_on_pages_and_in_errors_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    texts = [ROOT / "README.md", *DOCS.glob("*.md"), *(ROOT / "dynamo_trtllm").rglob("*.py")]
    named = [
        name
        for path in texts
        for names in re.findall(
            r"pip install -e '\.\[([\w,]+)\]'|install_hint\([\"'](\w+)", path.read_text()
        )
        for name in "".join(names).split(",")
    ]
    assert len(named) > 5
    assert set(named) <= set(extras)
