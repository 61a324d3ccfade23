"""From requests to vLLM's arguments: every field of Sampling, prefill and decode calls, and what is
rejected.
"""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.engines.vllm.chunk_threshold import ITL_LIMIT_S
from dynamo_trtllm.engines.vllm.patches.last_token import num_remote_tokens
from dynamo_trtllm.engines.vllm.requests import (
    FetchedKv,
    VllmModelLimits,
    VllmRequest,
    resamples_first_token,
)
from dynamo_trtllm.protocol.errors import ContextTooLong, RequestRejected
from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    OutputFormat,
    Phase,
    RequestSlo,
    Role,
    Sampling,
    StructuredOutput,
    token_ids,
)
from tests.kit.cases import each_case
from tests.kit.scripted_library import info_of

RULES = VllmModelLimits(role=Role.DECODE, info=info_of(eos_token_ids=(1, 2)), max_logprobs=20)
PARAMS = {"do_remote_prefill": True, "remote_request_id": "x"}
TRANSFER_PARAMS = FetchedKv(first_token=77, seed=None, kv_transfer_params=PARAMS)
JSON = StructuredOutput(alternatives=(OutputFormat(json_schema='{"type": "object"}'),))


def rules(**changes: Any) -> VllmModelLimits:
    return dataclasses.replace(RULES, **changes)


def request(length: int = 20, phase: Phase = Phase.AGGREGATED, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="m",
        token_ids=token_ids(range(10, 10 + length)),
        sampling=Sampling(**{"max_tokens": 8, "temperature": 0.0, **sampling}),
        deadline=time.time() + 60,
        phase=phase,
    )


CHANGED: dict[str, tuple[Any, dict[str, Any]]] = {
    "max_tokens": (5, {"max_tokens": 5}),
    "min_tokens": (3, {"min_tokens": 3}),
    "temperature": (0.7, {"temperature": 0.7}),
    "top_p": (0.9, {"top_p": 0.9}),
    "top_k": (40, {"top_k": 40}),
    "min_p": (0.1, {"min_p": 0.1}),
    "frequency_penalty": (0.5, {"frequency_penalty": 0.5}),
    "presence_penalty": (0.6, {"presence_penalty": 0.6}),
    "repetition_penalty": (1.2, {"repetition_penalty": 1.2}),
    "logit_bias": (((5, 2.0), (6, -3.0)), {"logit_bias": {5: 2.0, 6: -3.0}}),
    "guided": (JSON, {}),
    "seed": (42, {"seed": 42}),
    "stop_token_ids": ((9,), {"stop_token_ids": [1, 2, 9]}),
    "ignore_eos": (True, {"stop_token_ids": []}),
    "logprobs": (3, {"logprobs": 3}),
    "prompt_logprobs": (3, {"prompt_logprobs": 3}),
}


def test_fields_when_counted_then_all_of_sampling_are_held_here() -> None:
    assert set(CHANGED) == set(Sampling.__struct_fields__)


@each_case("name", sorted(CHANGED))
def test_call_field_sets_only_the_same_field_of_vllm(name: str) -> None:
    value, wanted = CHANGED[name]
    plain = VllmRequest(request(), RULES).sampling
    assert VllmRequest(request(**{name: value}), RULES).sampling == plain | wanted


def test_plain_call_leaves_no_choice_to_vllm() -> None:
    call = VllmRequest(request(), RULES)
    assert call.sampling["ignore_eos"] is True
    assert call.sampling["stop_token_ids"] == [1, 2]
    assert call.sampling["detokenize"] is False
    assert "extra_args" not in call.sampling


@pytest.mark.parametrize(
    ("guided", "wanted"),
    [
        (JSON, {"json": '{"type": "object"}'}),
        (StructuredOutput(alternatives=(OutputFormat(json_schema="{}"),)), {"json_object": True}),
    ],
)
def test_call_with_form_of_all_output_is_json_schema(guided: StructuredOutput, wanted: Any) -> None:
    assert VllmRequest(request(guided=guided), RULES).guided == wanted


def test_call_with_form_after_marker_is_structural_tag() -> None:
    guided = StructuredOutput(alternatives=JSON.alternatives, trigger="<|go|>")
    said = VllmRequest(request(guided=guided), RULES).guided
    assert said is not None
    form = json.loads(said["structural_tag"])["format"]
    assert (form["type"], form["triggers"]) == ("triggered_tags", ["<|go|>"])


def test_prefill_of_several_tokens_makes_one_and_holds_kv() -> None:
    call = VllmRequest(request(phase=Phase.PREFILL, min_tokens=4), RULES)
    assert call.exports_kv
    assert (call.sampling["max_tokens"], call.sampling["min_tokens"]) == (1, 1)
    assert call.sampling["extra_args"]["kv_transfer_params"]["do_remote_decode"] is True


@pytest.mark.parametrize("changes", [{"max_tokens": 1}, {"length": 99}])
def test_prefill_of_one_token_holds_nothing(changes: dict[str, Any]) -> None:
    call = VllmRequest(request(phase=Phase.PREFILL, **changes), RULES)
    assert not call.exports_kv
    assert "extra_args" not in call.sampling


@each_case(
    ("length", "sampling", "wanted"),
    [
        (20, {}, False),
        (20, {"temperature": 1.0}, False),
        (20, {"seed": 4}, False),  # greedy: a seed changes nothing
        (20, {"repetition_penalty": 1.3, "min_tokens": 4, "logit_bias": ((5, 1.0),)}, False),
        (32, {}, False),
        (20, {"temperature": 1.0, "seed": 4}, True),
        (20, {"frequency_penalty": 0.5}, True),
        (20, {"presence_penalty": 0.5}, True),
        (20, {"guided": JSON}, True),
    ],
)
def test_first_token_is_made_again_where_its_side_matters(
    length: int, sampling: dict[str, Any], wanted: bool
) -> None:
    asked = request(length, Phase.DECODE, **sampling)
    assert resamples_first_token(asked) is wanted
    call = VllmRequest(asked, RULES, TRANSFER_PARAMS)
    own = [] if wanted else [77]
    assert call.prompt == [*asked.token_ids, *own]
    assert list(call.tokens_of_prefill) == own
    assert call.sampling["max_tokens"] == 8 - len(own)
    assert call.sampling["min_tokens"] == max(0, asked.sampling.min_tokens - len(own))
    assert call.sampling["extra_args"] == {"kv_transfer_params": PARAMS}


@pytest.mark.parametrize("kv_params", [None, TRANSFER_PARAMS])
def test_scheduler_gets_the_limit_between_tokens(kv_params: FetchedKv | None) -> None:
    phase = Phase.AGGREGATED if kv_params is None else Phase.DECODE
    for slo, wanted in ((None, None), (RequestSlo(ttft_s=1.0), None), (RequestSlo(itl_s=0.1), 0.1)):
        asked = msgspec.structs.replace(request(phase=phase), slo=slo)
        extra = VllmRequest(asked, RULES, kv_params).sampling.get("extra_args", {})
        assert extra.get(ITL_LIMIT_S) == wanted
        assert ("kv_transfer_params" in extra) is (kv_params is not None)


def test_seed_of_random_first_token_is_that_of_prefill() -> None:
    asked = request(20, Phase.PREFILL, temperature=1.0, presence_penalty=0.5)
    seed = VllmRequest(asked, RULES).seed
    assert seed is not None
    assert VllmRequest(asked, RULES).seed != seed
    again = msgspec.structs.replace(asked, phase=Phase.DECODE)
    kv_params = FetchedKv(first_token=77, seed=seed, kv_transfer_params=PARAMS)
    assert VllmRequest(again, RULES, kv_params).sampling["seed"] == seed


@pytest.mark.parametrize(
    "sampling", [{"temperature": 1.0}, {"temperature": 0.0, "presence_penalty": 0.5}]
)
def test_seed_is_absent_when_nothing_is_random(sampling: dict[str, Any]) -> None:
    assert VllmRequest(request(20, Phase.PREFILL, **sampling), RULES).sampling["seed"] is None


@each_case(
    ("prompt", "held", "read"),
    [
        (21, 20, 20),  # with prefill's first token behind it
        (33, 32, 32),  # which needs a block that is not held
        (32, 31, 31),
        (20, 20, 19),  # without: its last token is computed
        (33, 33, 33),  # but not if that is alone in its block
        (32, 32, 31),
        (1, 1, 1),
        (2, 1, 1),
        (20, 0, 0),  # it is not known how much is held
    ],
)
def test_read_of_remote_prefill_excludes_last_token(prompt: int, held: int, read: int) -> None:
    assert num_remote_tokens(prompt, held, 16) == read


@pytest.mark.parametrize(
    ("asked", "error", "field"),
    [
        (request(0), RequestRejected, "token_ids"),
        (request(100), ContextTooLong, None),
        (
            msgspec.structs.replace(request(), token_ids=token_ids([1000])),
            RequestRejected,
            "token_ids",
        ),
        (request(logprobs=21), RequestRejected, "logprobs"),
        # vLLM raises ValueError
        (msgspec.structs.replace(request(), priority=1), RequestRejected, "priority"),
    ],
)
def test_call_when_it_can_not_be_served_then_refused_by_name(
    asked: GenerateRequest, error: type[Exception], field: str | None
) -> None:
    with pytest.raises(error) as caught:
        VllmRequest(asked, RULES)
    assert getattr(caught.value, "field", None) == field


def test_call_without_tokenizer_rejects_forms() -> None:
    with pytest.raises(RequestRejected) as caught:
        VllmRequest(request(guided=JSON), rules(info=info_of(unsupported_features=("guided",))))
    assert caught.value.field == "guided"


def test_aggregated_worker_rejects_partial_calls() -> None:
    with pytest.raises(RequestRejected) as caught:
        VllmRequest(request(phase=Phase.PREFILL), rules(role=Role.AGGREGATED))
    assert caught.value.field == "phase"


def test_decode_when_the_transfer_holds_all_tokens_then_refused() -> None:
    with pytest.raises(RequestRejected):
        VllmRequest(request(phase=Phase.DECODE, max_tokens=1), RULES, TRANSFER_PARAMS)
