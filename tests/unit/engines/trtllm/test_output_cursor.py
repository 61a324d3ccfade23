"""Deltas out of results that grow, change in place, and lose their stop token."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from dynamo_trtllm.engines.trtllm.library import TrtllmCall
from dynamo_trtllm.protocol.errors import RequestRejected
from dynamo_trtllm.protocol.messages import TokenLogprob

STOPS = frozenset({90, 91})


def output(
    *ids: int, finish: str | None = None, stop: int | None = None, logprobs: Any = None
) -> Any:
    return SimpleNamespace(
        token_ids=list(ids), finish_reason=finish, stop_reason=stop, logprobs=logprobs
    )


class Step(NamedTuple):
    token_ids: list[int]
    logprobs: tuple[TokenLogprob, ...]
    finish: str | None


class Reader:
    """A call whose results are read."""

    def __init__(self, logprobs: int | None, first: tuple[TokenLogprob, ...]) -> None:
        library: Any = SimpleNamespace(bindings=SimpleNamespace(is_since_1_2=True))
        request: Any = SimpleNamespace(
            request_id="r",
            sampling=SimpleNamespace(logprobs=logprobs),
            kv_params=SimpleNamespace(first_logprobs=first),
        )
        converted: Any = SimpleNamespace(exports_kv=False, stop_ids=STOPS, sampling={"end_id": 90})
        self.call = TrtllmCall(library, request, converted, None)

    def read(self, completion: Any) -> Step:
        chunk, finish = self.call.read(SimpleNamespace(outputs=[completion], cached_tokens=None))
        return Step(chunk.token_ids.tolist(), chunk.logprobs, finish)


def reader(logprobs: int | None = None, first: tuple[TokenLogprob, ...] = ()) -> Reader:
    return Reader(logprobs, first)


def entry(**values: float) -> dict[int, Any]:
    return {int(name[1:]): SimpleNamespace(logprob=value, rank=1) for name, value in values.items()}


def all_ids(*outputs: Any) -> list[int]:
    read = reader()
    return [token for output in outputs for token in read.read(output).token_ids]


def test_read_when_ids_are_cumulative_then_each_is_given_once() -> None:
    assert all_ids(
        output(1), output(1, 2), output(1, 2, 3, 4), output(1, 2, 3, 4, finish="length")
    ) == [1, 2, 3, 4]


def test_read_keeps_earlier_steps_of_a_changing_object() -> None:
    same = output(1)
    read = reader()
    first = read.read(same)
    same.token_ids.append(2)
    second = read.read(same)
    assert (first.token_ids, second.token_ids) == ([1], [2])


def test_read_does_not_repeat_the_stop_token() -> None:
    assert all_ids(output(1), output(1, 91, finish="stop", stop=91)) == [1, 91]


def test_read_when_the_stop_token_was_cut_then_it_is_put_back() -> None:
    assert all_ids(output(1), output(1, 2, finish="stop", stop=91)) == [1, 2, 91]


def test_read_stop_token_that_was_cut_appears_once() -> None:
    assert all_ids(output(1), output(1, 91), output(1, finish="stop", stop=91)) == [1, 91]


def test_read_stop_word_as_last_token_finishes_with_stop() -> None:
    found = [reader().read(output(1, token, finish="length")).finish for token in (2, 90, 91)]
    assert found == ["length", "stop", "stop"]
    same = reader()
    assert same.read(output(1, 91)).finish is None
    assert same.read(output(1, 91, finish="length")).finish == "stop"  # a last step without a token


def test_read_when_the_end_id_is_not_shown_then_it_is_put_back() -> None:
    assert all_ids(output(1), output(1, finish="stop")) == [1, 90]


def test_read_of_only_the_end_gives_one_token() -> None:
    assert all_ids(output(finish="stop")) == [90]


def test_read_when_finished_by_length_then_nothing_is_added() -> None:
    step = reader().read(output(1, finish="length"))
    assert step == ([1], (), "length")


def test_logprobs_when_not_asked_then_none_are_read() -> None:
    assert reader().read(output(1, logprobs=[object()])).logprobs == ()


def test_logprobs_when_mapped_then_own_value_and_the_likeliest() -> None:
    read = reader(logprobs=1)
    step = read.read(output(5, logprobs=[entry(t5=-2.0, t7=-0.5)]))
    assert step.logprobs == (TokenLogprob(5, -2.0, ((7, -0.5),)),)


def test_logprobs_without_alternatives_drop_the_surplus() -> None:
    assert reader(logprobs=0).read(output(5, logprobs=[entry(t5=-2.0)])).logprobs == (
        TokenLogprob(5, -2.0),
    )


def test_logprobs_when_flat_then_they_are_taken_as_they_are() -> None:
    read = reader(logprobs=1)
    assert read.read(output(5, logprobs=[-1.5])).logprobs == (TokenLogprob(5, -1.5),)
    assert read.read(output(5, 6, logprobs=[-1.5, -0.25])).logprobs == (TokenLogprob(6, -0.25),)


@pytest.mark.parametrize("given", [[], [-0.1]])
def test_logprobs_of_decode_begin_with_the_transfers(given: Any) -> None:
    first = TokenLogprob(5, -9.0, ((5, -9.0),))
    read = reader(logprobs=1, first=(first,))
    assert read.read(output(5, logprobs=given)).logprobs == (first,)
    assert read.read(output(5, 6, logprobs=[*given, -0.25])).logprobs == (TokenLogprob(6, -0.25),)


def test_logprobs_of_two_first_tokens_align_at_the_end() -> None:
    first = TokenLogprob(5, -9.0)
    step = reader(logprobs=0, first=(first,)).read(output(5, 6, logprobs=[-0.25]))
    assert step.logprobs == (first, TokenLogprob(6, -0.25))


def test_logprobs_stay_when_only_the_stop_token_is_cut() -> None:
    step = reader(logprobs=0).read(output(1, finish="stop", stop=91, logprobs=[-1.0, -2.0]))
    assert step.logprobs == (TokenLogprob(1, -1.0), TokenLogprob(91, -2.0))


def test_logprobs_cut_with_the_stop_token_are_unknown() -> None:
    step = reader(logprobs=0).read(output(1, finish="stop", stop=91, logprobs=[-1.0]))
    assert step.logprobs == (TokenLogprob(1, -1.0), TokenLogprob(91, -math.inf))


def test_missing_logprobs_name_the_field() -> None:
    read = reader(logprobs=0)
    read.read(output(1, logprobs=[-1.0]))
    with pytest.raises(RequestRejected) as caught:
        read.read(output(1, 2, logprobs=[-1.0]))
    assert caught.value.field == "logprobs"
