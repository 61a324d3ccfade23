import datetime
import logging
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.config import layers
from dynamo_trtllm.config.layers import (
    Source,
    as_yaml,
    check_keys,
    merge,
    nested,
    read_yaml,
)
from dynamo_trtllm.config.text_table import format_table
from dynamo_trtllm.protocol.errors import ConfigError


def bomb(line: str) -> str:
    """Ten lines, each of which stands for ten times the one before it."""
    lines = (
        line.replace("ALIASES", ", ".join([f"*a{n - 1}"] * 10)).replace("NAME", f"a{n}")
        for n in range(1, 10)
    )
    return "a0: &a0 {x: 1}\n" + "".join(lines)


def nested_list(levels: int) -> list[Any]:
    value: list[Any] = [1]
    for _ in range(levels - 2):
        value = [value]
    return value


def merged(*values: dict[str, Any]) -> layers.Merged:
    return merge([Source(value, source) for value, source in zip(values, "abcdef", strict=False)])


def result(*values: dict[str, Any]) -> dict[str, Any]:
    return nested(merged(*values).leaves)


def test_merge_of_three_layers_takes_the_last():
    leaves = merged({"x": 1, "y": 1, "z": 1}, {"y": 2, "z": 2}, {"z": 3}).leaves
    assert leaves == {"x": (1, "a"), "y": (2, "b"), "z": (3, "c")}


def test_merge_of_mappings_keeps_leaves_side_by_side():
    leaves = merged({"kv": {"fraction": 0.5, "dtype": "auto"}}, {"kv": {"fraction": 0.9}}).leaves
    assert leaves["kv.fraction"] == (0.9, "b")
    assert leaves["kv.dtype"] == ("auto", "a")
    assert nested(leaves) == {"kv": {"fraction": 0.9, "dtype": "auto"}}


@pytest.mark.parametrize(
    ("low", "high"),
    [({"a": {"b": 1}}, {"a": 2}), ({"a": 2}, {"a": {"b": 1}}), ({"a": {"b": 1}}, {"a": [1]})],
)
def test_merge_of_mapping_and_value_replaces_the_subtree(low, high):
    assert result(low, high) == high


def test_merge_of_empty_mapping_loses_nothing():
    assert result({"a": {"b": 1}}, {"a": {}}) == {"a": {"b": 1}}
    assert result({"a": {}}) == {"a": {}}


def test_merge_treats_odd_keys_as_one_value():
    given = {"sizes": {1: 2}, "names": {"a.b": 1}}
    assert result(given) == given


def test_merge_reports_an_overridden_value_with_places():
    layer = [
        Source({"max_num_tokens": 16384, "kv": {"dtype": "fp8"}}, "YAML d.yaml"),
        Source({"max_num_tokens": 20000, "kv": None}, "flag --max-num-tokens"),
    ]
    assert merge(layer).notes == [
        "--max-num-tokens 20000 overrides max_num_tokens 16384 of YAML d.yaml",
        "--max-num-tokens null overrides kv.dtype fp8 of YAML d.yaml",
    ]


@pytest.mark.parametrize("key", [datetime.date(2001, 1, 1), (1, 2)])
def test_merge_reports_an_overridden_mapping_with_odd_keys(key):
    notes = merged({"a": {key: 1}}, {"a": 5}).notes
    assert notes == [f"b 5 overrides a { ({key: 1}) } of a"]


def test_merge_of_equal_values_reports_nothing():
    assert merged({"x": 1}, {"x": 1}).notes == []


def test_merge_when_advice_is_beaten_then_nothing_is_said():
    leaves, notes = merge([Source({"x": 1}, "advice", is_default=True), Source({"x": 2}, "b")])
    assert (leaves, notes) == ({"x": (2, "b")}, [])


def test_as_yaml_reads_back_equal_with_sources(tmp_path):
    values = {
        "n": 1,
        "text": "a: # b",
        "none": None,
        "kv": {"dtype": "fp8", "sizes": [1, 2]},
        "empty": {},
    }
    path = tmp_path / "out.yaml"
    path.write_text(
        layers.as_yaml(merge([Source(values, "YAML x"), Source({"n": 2}, "flag --n")]).leaves)
    )
    assert read_yaml(path) == values | {"n": 2}
    lines = path.read_text().splitlines()
    assert "n: 2  # flag --n" in lines
    assert "  sizes: [1, 2]  # YAML x" in lines


@pytest.mark.parametrize("values", [{"a\nb": 1}, {"a\n": {"\nb": "c\nd"}}])
def test_as_yaml_with_line_breaks_in_keys_reads_back_equal(tmp_path, values):
    path = tmp_path / "out.yaml"
    path.write_text(as_yaml(merge([Source(values, "YAML x")]).leaves))
    assert read_yaml(path) == values


def test_table_when_printed_then_columns_stand_below_each_other():
    assert format_table([("a", "bb", "c"), ("aaa", "b", "cc")]) == "a    bb  c\naaa  b   cc\n"


def test_check_keys_suggests_the_nearest():
    with pytest.raises(
        ConfigError, match=r"x.yaml: unknown key 'max_batch_sz'; did you mean 'max_batch_size'\?"
    ):
        check_keys(["max_batch_sz"], ["max_batch_size", "max_num_tokens"], "x.yaml")


def test_check_keys_when_nothing_is_alike_then_all_are_listed():
    with pytest.raises(ConfigError, match="known: alpha, beta"):
        check_keys(["zzz"], ["beta", "alpha"], "x.yaml")


def test_read_yaml_returns_the_mapping(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("base: &b {x: 1}\nkv:\n  <<: *b\n  y: 2\n")
    assert read_yaml(path) == {"base": {"x": 1}, "kv": {"x": 1, "y": 2}}


def test_read_yaml_when_the_file_is_empty_then_nothing_is_set(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("# only a comment\n")
    assert read_yaml(path) == {}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a: 1\nb: 2\na: 3\n", ":3: key 'a' is given twice"),
        ("kv:\n  a: 1\n  a: 2\n", ":3: key 'a' is given twice"),
        ("kv: {1: a, 0x1: b}\n", ":1: key '0x1' is given twice"),
        ("- 1\n", ":1: expected a mapping"),
        ("a: [1\nb: 2\n", ":2: "),
        ("1: 2\n", "key 1 is not text"),
        ("a: !!python/object:os.system {}\n", ":1: "),
        (bomb("NAME: &NAME [ALIASES]\n"), ":5: more than 10000 values with aliases expanded"),
        (bomb("NAME: &NAME {<<: [ALIASES]}\n"), ":5: more than 10000 values"),
        ("a: &a\n  b: [*a]\n", ":2: an alias refers to a value that contains it"),
        ("a: " + "[" * 100_000, ":1: more than 64 levels"),
        ("a: b\n" + "[{" * 500, ":2: more than 64 levels"),
        (
            "a:\n" + "".join(f"  - &n{n} [{f'*n{n - 1}' if n else ''}]\n" for n in range(70)),
            ":66: more than 64 levels",
        ),
        ("a: " + "x" * 300_000, "has more than 262144 bytes"),
        ("a: 2026-99-99\n", "month must be in 1..12; quote the value"),
        ("a: " + "1" * 5_000, "integer string conversion"),
    ],
    ids=lambda value: value[:20],
)
def test_read_yaml_error_names_file_and_line(tmp_path, text, wanted):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert caught.value.message.startswith(str(path))
    assert wanted in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('a: {1: x, "1": y}\n', {"a": {1: "x", "1": "y"}}),
        ("a: {=: 1, b: 2}\n", {"a": {"=": 1, "b": 2}}),
        # `m` is merged into `top` before it is read itself.
        (
            "base: &b {x: 1}\na: {n: &m {<<: *b, x: 2}}\ntop: {<<: *m}\n",
            {"base": {"x": 1}, "a": {"n": {"x": 2}}, "top": {"x": 2}},
        ),
    ],
)
def test_read_yaml_accepts_different_keys(tmp_path: Path, text: str, wanted: Any) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    assert read_yaml(path) == wanted


@pytest.mark.parametrize("values", [{"a" + ".b" * 63: 1}, {"a" + ".b" * 40: nested_list(24)}])
def test_dots_in_keys_make_no_file_that_cannot_be_read(tmp_path: Path, values: Any) -> None:
    with pytest.raises(ConfigError, match=r"override: 'a\.b.* has more than 64 levels; nest less"):
        merge([Source(values, "override")])
    fewer = {key.removesuffix(".b"): value for key, value in values.items()}
    path = tmp_path / "a.yaml"
    path.write_text(as_yaml(merge([Source(fewer, "override")]).leaves))
    assert read_yaml(path)


def test_read_yaml_when_the_file_is_missing_then_it_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.yaml: can't be read: No such file"):
        read_yaml(tmp_path / "gone.yaml")


def test_read_yaml_when_the_file_is_not_text_then_it_is_named(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"a\.yaml: can't be read"):
        read_yaml(tmp_path / "a.yaml")


def test_located_prefers_a_local_path_to_the_shipped_one(tmp_path: Path) -> None:
    here = tmp_path / "mine.yaml"
    here.write_text("a: 1\n")
    assert layers.find_file(here) == here
    # any file that is in the package
    assert layers.find_file(Path("config/layers.py")) == Path(layers.__file__)
    assert layers.find_file(Path("nowhere.yaml")) == Path("nowhere.yaml")


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("engine_configs/gpt_oss/prefill.yaml", "engine_configs/gpt-oss-120b/v0.5/prefill.yaml"),
        (
            "components/backends/trtllm/engine_configs/gpt_oss/decode.yaml",
            "engine_configs/gpt-oss-120b/v0.5/decode.yaml",
        ),
        (
            "examples/backends/trtllm/engine_configs/gpt-oss-120b/prefill.yaml",
            "engine_configs/gpt-oss-120b/prefill.yaml",
        ),
        (
            "/workspace/examples/backends/trtllm/engine_configs/gpt-oss-120b/decode.yaml",
            "engine_configs/gpt-oss-120b/decode.yaml",
        ),
        (
            "/workspace/dynamo/components/backends/trtllm/engine_configs/gpt_oss/prefill.yaml",
            "engine_configs/gpt-oss-120b/v0.5/prefill.yaml",
        ),
    ],
)
def test_located_guide_file_is_replaced_by_ours(typed, ours, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO):
        found = layers.find_file(Path(typed))
    assert found.is_file()
    assert found.as_posix().endswith(ours)
    assert [record.getMessage() for record in caplog.records] == [
        f"{typed} does not exist; using {ours}"
    ]


def test_located_local_guide_path_is_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = Path("engine_configs/gpt_oss/prefill.yaml")
    here.parent.mkdir(parents=True)
    here.write_text("stream_interval: 1\n")
    assert layers.find_file(here) == here


@pytest.mark.parametrize(
    "path", ["/home/me/engine_configs/gpt_oss/prefill.yaml", "configs/prefill.yaml"]
)
def test_located_when_a_path_is_unknown_then_it_stays(path):
    assert layers.find_file(Path(path)) == Path(path)
