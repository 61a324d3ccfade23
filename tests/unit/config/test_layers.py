from pathlib import Path

import pytest

from dynamo_trtllm.config import layers
from dynamo_trtllm.config.layers import check_keys, merge_engine_args, nested, read_yaml
from dynamo_trtllm.errors import ConfigError


def test_merge_when_three_layers_name_a_leaf_then_the_override_wins_and_says_so():
    merged = merge_engine_args({"a": 1, "b": 1, "c": 1}, {"b": 2, "c": 2}, {"c": 3})
    assert merged == {"a": (1, "YAML file"), "b": (2, "flag"), "c": (3, "--override-engine-args")}


def test_merge_when_mappings_meet_then_leaves_are_kept_side_by_side():
    merged = merge_engine_args({"kv": {"fraction": 0.5, "dtype": "auto"}}, {"kv": {"fraction": 0.9}}, {})
    assert merged["kv.fraction"] == (0.9, "flag")
    assert merged["kv.dtype"] == ("auto", "YAML file")
    assert nested(merged) == {"kv": {"fraction": 0.9, "dtype": "auto"}}


@pytest.mark.parametrize(
    ("low", "high"), [({"a": {"b": 1}}, {"a": 2}), ({"a": 2}, {"a": {"b": 1}}), ({"a": {"b": 1}}, {"a": [1]})]
)
def test_merge_when_a_mapping_and_a_value_meet_then_the_later_replaces_the_subtree(low, high):
    assert nested(merge_engine_args(low, {}, high)) == high


def test_merge_when_an_empty_mapping_comes_later_then_nothing_is_lost():
    assert nested(merge_engine_args({"a": {"b": 1}}, {}, {"a": {}})) == {"a": {"b": 1}}
    assert nested(merge_engine_args({"a": {}}, {}, {})) == {"a": {}}


def test_merge_when_keys_are_not_text_or_hold_dots_then_the_mapping_is_one_value():
    table = {"sizes": {1: 2}, "names": {"a.b": 1}}
    assert nested(merge_engine_args(table, {}, {})) == table


def test_check_keys_when_one_is_unknown_then_the_nearest_is_offered():
    with pytest.raises(ConfigError, match=r"x.yaml: unknown key 'max_batch_sz'; did you mean 'max_batch_size'\?"):
        check_keys(["max_batch_sz"], ["max_batch_size", "max_num_tokens"], "x.yaml")


def test_check_keys_when_nothing_is_alike_then_all_are_listed():
    with pytest.raises(ConfigError, match="known: alpha, beta"):
        check_keys(["zzz"], ["beta", "alpha"], "x.yaml")


def test_read_yaml_when_the_file_is_good_then_its_mapping_comes_back(tmp_path):
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
        ("- 1\n", ":1: expected a mapping"),
        ("a: [1\nb: 2\n", ":2: "),
        ("1: 2\n", "key 1 is not text"),
        ("a: !!python/object:os.system {}\n", ":1: "),
    ],
)
def test_read_yaml_when_the_file_is_bad_then_file_and_line_are_named(tmp_path, text, wanted):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert caught.value.message.startswith(str(path))
    assert wanted in caught.value.message
    assert "\n" not in caught.value.message


def test_read_yaml_when_the_file_is_missing_then_it_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.yaml: can't be read: No such file"):
        read_yaml(tmp_path / "gone.yaml")


def test_read_yaml_when_the_file_is_not_text_then_it_is_named(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"a\.yaml: can't be read"):
        read_yaml(tmp_path / "a.yaml")


def test_located_when_path_is_here_then_it_is_kept_and_else_the_shipped_one_is_found(tmp_path: Path) -> None:
    here = tmp_path / "mine.yaml"
    here.write_text("a: 1\n")
    assert layers.located(here) == here
    assert layers.located(Path("config/layers.py")) == Path(layers.__file__)  # any file that is in the package
    assert layers.located(Path("nowhere.yaml")) == Path("nowhere.yaml")
