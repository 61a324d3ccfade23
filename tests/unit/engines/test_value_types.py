"""Values of arguments are checked by the annotations of a release's manifest, without
conversions.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest

from dynamo_trtllm.engines import argument_schema as schema
from dynamo_trtllm.engines import value_types
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY as TRTLLM
from dynamo_trtllm.engines.vllm.api_manifests import LIBRARY as VLLM
from dynamo_trtllm.protocol.errors import ConfigError
from tests.kit.cases import each_case

RELEASE = next(release for release in TRTLLM.releases if release.name == "1.2.1")


@each_case(
    ("annotation", "right", "wrong", "description"),
    [
        ("int", [3], [True, 3.0, "3", None], "a whole number"),
        ("float", [3, 0.5], [True, "0.5"], "a number"),
        ("bool", [True], [1, "true"], "true or false"),
        ("Optional[str]", ["x", None], [3, ["x"]], "text or null"),
        ("Path", ["/x"], [3], "text"),
        (
            "Optional[List[int]]",
            [[1, 2], [], None],
            [[True], ["1"], 1, (1, 2)],
            "a list of int or null",
        ),
        (
            "Union[bool, Literal['auto']]",
            [True, "auto"],
            ["AUTO", 1],
            "true or false or one of auto",
        ),
        ("Optional[Dict[str, Any]]", [{"a": 1}, {1: 2}], [[1]], "a mapping (key: value) or null"),
        ("Optional[KvCacheConfig]", [{"dtype": 3}], ["x"], "a mapping (key: value) or null"),
        ("Optional[object]", ["x", 3, object], [], ""),
    ],
)
def test_value_fits_only_its_annotation(
    annotation: str, right: list[Any], wrong: list[Any], description: str
) -> None:
    assert [value for value in right if not value_types.fits(value, annotation, RELEASE)] == []
    assert [value for value in wrong if value_types.fits(value, annotation, RELEASE)] == []
    if description:
        assert value_types.description(annotation, RELEASE) == description


def test_value_of_enumeration_ignores_case() -> None:
    for word in ("AUTO", "dummy", "Dummy"):
        assert value_types.fits(word, "Union[str, LoadFormat]", RELEASE)
    assert not value_types.fits("torch", "Union[str, LoadFormat]", RELEASE)


def test_value_of_caseless_literals_fits_in_any_case() -> None:
    assert value_types.fits("Bfloat16", "Literal['auto', 'bfloat16']", VLLM.newest)
    assert not value_types.fits("Bfloat16", "Literal['auto', 'bfloat16']", RELEASE)


def test_word_of_partly_read_class_is_passed_with_a_note() -> None:
    partly = copy(RELEASE)
    partly.not_read |= {"MoeConfig in part"}
    given = {"moe_config": {"backend": "NEWKERNELS"}}
    (note,) = schema.check(given, partly, "YAML x.yaml")
    assert note.startswith("moe_config.backend 'NEWKERNELS' is passed on unchecked")
    with pytest.raises(
        ConfigError, match=r"moe_config\.backend is .NEWKERNELS.: expected one of CUTLASS"
    ):
        schema.check(given, RELEASE, "YAML x.yaml")


@pytest.mark.parametrize("value", ["cutlass", 3, True])
def test_value_that_is_no_new_word_is_rejected(value: Any) -> None:
    partly = copy(RELEASE)
    partly.not_read |= {"MoeConfig in part"}
    with pytest.raises(ConfigError, match="expected one of CUTLASS"):
        schema.check({"moe_config": {"backend": value}}, partly, "YAML x.yaml")
