"""Which texts are numbers, wherever a user or a client writes one."""

from __future__ import annotations

import pytest

from dynamo_trtllm.config.config_base import Config, PositiveFloat, PositiveInt, option
from dynamo_trtllm.config.load import load
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.number_text import is_digits, parse_float, parse_int
from tests.kit.cases import each_case

FIVE = "\u0665"  # the Arabic digit 5
WRONG = ["1_000", FIVE, "²", "0x10", "nan", "inf", "-inf", "1e999", "", " ", "1 000", "1,5", "--5"]
ONLY_PYTHON = ["1_000", "1_0.5", FIVE, "nan", "inf", "Infinity"]


class NumbersConfig(Config):
    """Numbers."""

    whole: PositiveInt | None = option("this command", None, help="A whole number.")
    real: PositiveFloat = option("this command", 1.0, help="A number.")
    several: tuple[float, ...] = option("this command", (), help="Numbers.")
    name: str = option("this command", "", help="A text.")


@each_case("text", WRONG)
def test_text_with_other_characters_is_no_number(text: str) -> None:
    with pytest.raises(ValueError, match="the digits 0 to 9"):
        parse_float(text)
    with pytest.raises(ValueError, match="the digits 0 to 9"):
        parse_int(text)
    assert not is_digits(text)


@each_case(
    ("text", "number"),
    [("5", 5.0), (" 5 ", 5.0), ("+5", 5.0), ("1e3", 1000.0), (".5", 0.5), ("5.", 5.0), ("-2", -2)],
)
def test_number_of_digits_is_read(text: str, number: float) -> None:
    assert parse_float(text) == number


def test_minus_zero_is_zero() -> None:
    assert str(parse_float("-0")) == "0.0"
    assert parse_int("-0") == 0


@each_case("text", ONLY_PYTHON)
@each_case("flag", ["--whole", "--real", "--several"])
def test_flag_and_variable_follow_the_rule(flag: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"flag {flag} is .*the digits 0 to 9"):
        load(NumbersConfig, prog="x", argv=[flag, text], environ={})
    assert load(NumbersConfig, prog="x", argv=["--name", text], environ={}).name == text
