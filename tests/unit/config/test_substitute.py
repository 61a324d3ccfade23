import pytest

from dynamo_trtllm.config.deployment import expand_env
from dynamo_trtllm.protocol.errors import ConfigError
from tests.kit.cases import each_case

SET = {"A": "x", "EMPTY": "", "PATH_LIKE": "/m: #1"}


@each_case(
    ("text", "wanted"),
    [
        ("plain", "plain"),
        ("${A}", "x"),
        ("${A:-y}", "x"),
        ("${B:-y}", "y"),
        ("${B:-}", ""),
        ("${EMPTY:-y}", "y"),
        ("${EMPTY}", ""),
        ("/models/${A}/${B:-0,1}", "/models/x/0,1"),
        ("${B:-nats://localhost:4222}", "nats://localhost:4222"),
        ("${PATH_LIKE}", "/m: #1"),
        ("$A costs $5", "$A costs $5"),
        ("$${A}", "${A}"),
    ],
)
def test_text_references_are_replaced_as_in_a_shell(text, wanted):
    assert expand_env(text, SET, "f") == wanted


def test_nested_text_values_are_replaced():
    value = {"${A}": [{"k": "${A}"}, 3, None, True]}
    assert expand_env(value, SET, "f") == {"${A}": [{"k": "x"}, 3, None, True]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("${B}", r"f\.k\[0\]: B is not set in the environment, and \$\{B\} has no default"),
        ("${B", r"f\.k\[0\]: '\$\{B' is not"),
        ("${1}", r"'\$\{1\}' is not"),
        ("${A:+y}", r"'\$\{A:\+y\}' is not"),
    ],
)
def test_irreplaceable_reference_is_named_with_its_place(text, said):
    with pytest.raises(ConfigError, match=said):
        expand_env(["x", {"k": [text]}][1], SET, "f")
