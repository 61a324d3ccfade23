"""Keys of records and subjects: both ways, and what they refuse."""

from __future__ import annotations

import pytest

from dynamo_trtllm.cluster.discovery import records
from dynamo_trtllm.cluster.discovery.records import EndpointId
from tests.kit.cases import each_case

GENERATE = EndpointId("dynamo", "tensorrt_llm", "generate")


@pytest.mark.parametrize("instance_id", [0, 1, 0x694D997DBAE9A315, 2**63 - 1])
def test_instance_key_when_parsed_then_id_comes_back(instance_id: int) -> None:
    assert records.parse_instance_key(records.instance_key(GENERATE, instance_id)) == (
        GENERATE,
        instance_id,
    )


def test_instance_key_is_under_its_namespace_only() -> None:
    key = records.instance_key(GENERATE, 7)
    assert key == "v1/instances/dynamo/tensorrt_llm/generate/7"
    assert key.startswith(records.namespace_prefix("dynamo"))
    assert not key.startswith(records.namespace_prefix("dyn"))


def test_endpoint_when_printed_and_parsed_then_equal() -> None:
    assert records.parse_endpoint(str(GENERATE)) == GENERATE


@pytest.mark.parametrize(
    "key", ["", "v1/instances/a/b/c", "v2/instances/a/b/c/1", "v1/instances/a/b/c/xyz"]
)
def test_instance_id_when_key_is_foreign_then_value_error(key: str) -> None:
    with pytest.raises(ValueError, match=r"is not an instance key"):
        records.parse_instance_key(key)


@each_case("written", ["0a", "A", "0xa", "+a", "-a", " a", "a_0", "", "1" * 17])
def test_instance_id_of_malformed_key_is_value_error(written: str) -> None:
    """Else one id would have several keys."""
    with pytest.raises(ValueError, match=r"is not an instance key"):
        records.parse_instance_key(f"v1/instances/a/b/c/{written}")


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("v1/instances/dynamo/a/b/1", "v1/instances/dynamo/a/b/1"),
        ("a\n\x1b[2J\udcff", r"a\n\x1b[2J\udcff"),
        ("naïve", "naïve"),
    ],
)
def test_shown_key_when_short_then_escaped(key: str, shown: str) -> None:
    assert records.shown_key(key) == shown


def test_shown_key_is_bounded_and_unique() -> None:
    shown = {records.shown_key("\U000e0001" * 100_000 + end) for end in ("", "a", "b", "\udcff")}
    assert len(shown) == 4
    assert max(map(len, shown)) < 300


def test_subject_when_made_then_formatted_as_in_the_guides() -> None:
    assert records.subject(EndpointId("dynamo", "backend", "generate"), 0x694D997DBAE9A315) == (
        "dynamo_backend.generate-694d997dbae9a315"
    )
