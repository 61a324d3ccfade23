"""What a request becomes for `generate_async`, and what is refused before it is called."""

from __future__ import annotations

import json
from array import array
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.engines.engine_interface import EngineInfo, PromptLimit
from dynamo_trtllm.engines.trtllm.requests import TrtllmRequest, reported_phases
from dynamo_trtllm.protocol.errors import ContextTooLong, RequestRejected
from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    OutputFormat,
    Phase,
    Role,
    Sampling,
    StructuredOutput,
    token_ids,
)
from tests.kit.instances import make_transfer_params
from tests.kit.scripted_library import info_of

RETURN = 200002
CALL = 200012
EOS = 199999
TIMES = (
    "arrival_time",
    "first_scheduled_time",
    "kv_cache_transfer_start",
    "kv_cache_transfer_end",
    "first_token_time",
)
SCHEMA = json.dumps({"type": "object", "properties": {"city": {"type": "string"}}})


def rules(**changes: Any) -> Any:
    values = {
        "role": Role.PREFILL,
        "prompt_limits": {phase: PromptLimit(40, f"limit of {phase}") for phase in Phase},
        "has_structural_tags": True,
        "has_min_tokens": True,
        "dp_ranks": 0,
        "uses_conversations": False,
    }
    own = {"vocab_size": 201088, "eos_token_ids": (RETURN, CALL, EOS)}
    own |= {
        name: changes.pop(name) for name in list(changes) if name in EngineInfo.__dataclass_fields__
    }
    return SimpleNamespace(info=info_of(**own), **{**values, **changes})


def ask(
    prompt: int = 10, *, phase: Phase = Phase.PREFILL, salt: str | None = None, **sampling: Any
) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="m",
        token_ids=token_ids(range(prompt)),
        sampling=Sampling(**{"max_tokens": 20, **sampling}),
        deadline=0.0,
        phase=phase,
        cache_salt=salt,
    )


def test_call_when_prefill_then_one_token_is_asked_and_kv_stays() -> None:
    call = TrtllmRequest(ask(), rules())
    assert call.exports_kv
    assert not call.keywords["streaming"]
    assert call.sampling["max_tokens"] == 1
    assert call.max_tokens == 20


@pytest.mark.parametrize(("prompt", "max_tokens", "context"), [(10, 1, 100), (39, 20, 40)])
def test_call_of_one_token_transfers_nothing(prompt: int, max_tokens: int, context: int) -> None:
    call = TrtllmRequest(ask(prompt, max_tokens=max_tokens), rules(context_length=context))
    assert not call.exports_kv
    assert call.sampling["max_tokens"] == 1


def test_call_when_decode_then_it_streams_the_original_length() -> None:
    call = TrtllmRequest(ask(phase=Phase.DECODE), rules(role=Role.DECODE))
    assert call.keywords["streaming"]
    assert call.sampling["max_tokens"] == 20


def test_call_when_answer_would_leave_the_context_then_it_is_cut() -> None:
    assert (
        TrtllmRequest(ask(30, phase=Phase.AGGREGATED, max_tokens=500), rules()).sampling[
            "max_tokens"
        ]
        == 70
    )


def test_call_when_made_twice_then_nothing_is_shared() -> None:
    request = ask()
    settled = rules()
    first = TrtllmRequest(request, settled)
    second = TrtllmRequest(request, settled)
    first.sampling["max_tokens"] = 99
    first.keywords["inputs"].append(1)
    first.sampling["stop_token_ids"].append(1)
    assert second.sampling["max_tokens"] == 1
    assert second.keywords["inputs"] == list(range(10))
    assert 1 not in second.sampling["stop_token_ids"]


def test_stops_of_harmony_name_both_turn_ends() -> None:
    sampling = TrtllmRequest(ask(), rules()).sampling
    assert sampling["end_id"] == RETURN
    assert sampling["stop_token_ids"] == [EOS, CALL]
    assert sampling["include_stop_str_in_output"] is True
    assert sampling["detokenize"] is False


def test_stops_without_eos_are_foreign_only() -> None:
    call = TrtllmRequest(ask(ignore_eos=True, stop_token_ids=(7, CALL)), rules())
    # ignore_eos of 1.3 would drop all of them; without an end id only they stop
    assert (call.sampling["ignore_eos"], call.sampling["end_id"]) == (False, -1)
    assert call.sampling["stop_token_ids"] == [7]
    assert call.stop_ids == {7}
    assert TrtllmRequest(ask(ignore_eos=True), rules()).sampling["ignore_eos"] is True


@pytest.mark.parametrize("stop_token_ids", [(), (7,)])
def test_min_tokens_without_eos_is_omitted(stop_token_ids: tuple[int, ...]) -> None:
    request = ask(ignore_eos=True, min_tokens=3, stop_token_ids=stop_token_ids)
    assert "min_tokens" not in TrtllmRequest(request, rules(has_min_tokens=False)).sampling


def test_min_tokens_ignored_by_sampler_is_rejected() -> None:
    with pytest.raises(RequestRejected) as caught:
        TrtllmRequest(ask(min_tokens=3), rules(has_min_tokens=False))
    assert caught.value.field == "min_tokens"


def test_stops_of_model_without_any_use_vendor_never() -> None:
    sampling = TrtllmRequest(ask(), rules(eos_token_ids=())).sampling
    assert sampling["end_id"] == -1
    assert sampling["stop_token_ids"] is None


def test_greedy_sampling_sends_top_k_one() -> None:
    sampling = TrtllmRequest(ask(temperature=0.0, top_p=0.5), rules()).sampling
    assert sampling["top_k"] == 1
    assert "temperature" not in sampling
    assert "top_p" not in sampling


def test_sampling_when_random_by_default_then_it_is_said_in_full() -> None:
    sampling = TrtllmRequest(ask(), rules()).sampling
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (1.0, 1.0, None)


def test_sampling_when_asked_then_every_field_arrives() -> None:
    asked = {
        "min_tokens": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "seed": 11,
        "top_k": 5,
    }
    sampling = TrtllmRequest(ask(**asked), rules()).sampling
    assert {name: sampling[name] for name in asked} == asked


def test_sampling_when_neutral_then_penalties_are_left_out() -> None:
    sampling = TrtllmRequest(ask(), rules()).sampling
    assert not {
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "min_p",
        "min_tokens",
    } & set(sampling)


@pytest.mark.parametrize(("asked", "sent"), [(None, None), (0, 1), (1, 1), (5, 5)])
def test_logprobs_without_alternatives_ask_for_one(asked: int | None, sent: int | None) -> None:
    assert TrtllmRequest(ask(logprobs=asked), rules()).sampling["logprobs"] == sent


def test_prompt_over_limit_names_the_argument() -> None:
    with pytest.raises(ContextTooLong, match=r"41 tokens.* 40 \(limit of prefill\)"):
        TrtllmRequest(ask(41), rules())
    TrtllmRequest(ask(40), rules())


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (ask(0), "token_ids"),
        (ask(salt="tenant"), "cache_salt"),
        (ask(guided=StructuredOutput(alternatives=(OutputFormat(json_schema="{}"),))), "guided"),
        (ask(logit_bias=((1, 2.0),)), "logit_bias"),
        (ask(presence_penalty=1.0), "presence_penalty"),
    ],
)
def test_call_when_it_can_not_be_supported_then_refused_by_name(
    request_: GenerateRequest, field: str
) -> None:
    unsupported_features = ("cache_salt", "guided", "logit_bias", "presence_penalty")
    with pytest.raises(RequestRejected) as caught:
        TrtllmRequest(request_, rules(unsupported_features=unsupported_features))
    assert caught.value.field == field


TOO_LARGE = 300_000
GUIDED = StructuredOutput(
    alternatives=(OutputFormat(json_schema="{}"),), unfinished_ids=(TOO_LARGE,)
)
FIRST = msgspec.structs.replace(make_transfer_params("t"), first_token_ids=token_ids([TOO_LARGE]))


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (msgspec.structs.replace(ask(), token_ids=token_ids([1, TOO_LARGE])), "token_ids"),
        (ask(logit_bias=((1, 2.0), (TOO_LARGE, 2.0))), "logit_bias"),
        (ask(guided=GUIDED), "unfinished_ids"),
        (msgspec.structs.replace(ask(phase=Phase.DECODE), kv_params=FIRST), "first_token_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_call_with_unknown_token_is_rejected_by_name(call: GenerateRequest, field: str) -> None:
    with pytest.raises(RequestRejected, match=f"{TOO_LARGE} in {field} .* vocabulary") as caught:
        TrtllmRequest(call, rules())
    assert caught.value.field == field


def test_call_omits_unknown_stop_token() -> None:
    assert TrtllmRequest(ask(stop_token_ids=(7, TOO_LARGE)), rules()).stop_ids == {
        7,
        RETURN,
        CALL,
        EOS,
    }


def test_call_when_aggregated_then_no_call_of_a_pair_is_served() -> None:
    with pytest.raises(RequestRejected, match="aggregated"):
        TrtllmRequest(ask(), rules(role=Role.AGGREGATED))


def test_call_resumed_counts_tokens_as_prompt() -> None:
    request = msgspec.structs.replace(ask(10), num_resumed_output_tokens=4)
    assert TrtllmRequest(request, rules()).keywords["inputs"] == list(range(10))


# --- guided ---------------------------------------------------------------------------------------


def guided(*alternatives: OutputFormat, after: str = "", **changes: Any) -> dict[str, Any]:
    call = TrtllmRequest(
        ask(guided=StructuredOutput(alternatives=alternatives, trigger=after)), rules(**changes)
    )
    assert call.guided is not None
    return call.guided


def test_guided_when_a_schema_is_all_then_the_json_guide_is_used() -> None:
    assert guided(OutputFormat(json_schema=SCHEMA), has_structural_tags=False) == {"json": SCHEMA}


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("regex", {"type": "regex", "pattern": "a+"}),
        ("grammar", {"type": "grammar", "grammar": "a+"}),
    ],
)
def test_guided_regex_or_grammar_uses_its_own_field(kind: str, content: dict[str, str]) -> None:
    form = OutputFormat(json_schema="", **{kind: "a+"})
    assert guided(form, has_structural_tags=False) == {kind: "a+"}
    found = json.loads(guided(form, after="<|message|>")["structural_tag"])["format"]
    assert found["tags"] == [{"begin": "<|message|>", "content": content, "end": ""}]


def test_guided_when_any_object_then_json_object() -> None:
    assert guided(OutputFormat(json_schema="{}")) == {"json_object": True}


def test_guided_after_free_text_uses_a_triggered_tag() -> None:
    found = json.loads(
        guided(OutputFormat(json_schema=SCHEMA), after="<|message|>")["structural_tag"]
    )
    assert found["format"]["type"] == "triggered_tags"
    assert found["format"]["triggers"] == ["<|message|>"]
    assert found["format"]["stop_after_first"] is True
    assert found["format"]["tags"][0]["content"] == {
        "type": "json_schema",
        "json_schema": json.loads(SCHEMA),
    }


def test_guided_when_several_forms_then_one_of_them() -> None:
    forms = (
        OutputFormat(json_schema=SCHEMA, prefix="a "),
        OutputFormat(json_schema="{}", prefix="b "),
    )
    found = json.loads(guided(*forms)["structural_tag"])["format"]
    assert found["type"] == "or"
    assert [element["elements"][0]["value"] for element in found["elements"]] == ["a ", "b "]


def test_guided_without_tag_support_is_rejected_with_fix() -> None:
    with pytest.raises(RequestRejected, match="xgrammar"):
        guided(OutputFormat(json_schema=SCHEMA), after="x", has_structural_tags=False)


@pytest.mark.parametrize(
    ("phase", "rank"),
    [(Phase.PREFILL, 1), (Phase.DECODE, 0), (Phase.AGGREGATED, 0)],
    ids=lambda value: str(value),
)
def test_dp_rank_when_a_call_is_prefill_then_prefills_own(phase: Phase, rank: int) -> None:
    asked = msgspec.structs.replace(
        ask(phase=phase), dp_rank=0, prefill_dp_rank=1, relax_dp_rank=True
    )
    wanted = {"attention_dp_rank": rank, "attention_dp_relax": True}
    role = Role.PREFILL if phase is Phase.PREFILL else Role.DECODE
    assert TrtllmRequest(asked, rules(role=role, dp_ranks=2)).dp_rank == wanted
    with pytest.raises(RequestRejected, match=f"no attention-DP rank {rank}"):
        TrtllmRequest(asked, rules(role=role, dp_ranks=rank))


def test_priority_converts_to_distinct_32_bit_numbers() -> None:
    limits = rules(supported_features=("priority",))
    values = (-(1 << 40), -(1 << 20), -(1 << 20) + 1, -1, 1, (1 << 20) - 1, 1 << 20, 1 << 40)
    found = [
        TrtllmRequest(msgspec.structs.replace(ask(), priority=value), limits).keywords.get(
            "priority"
        )
        for value in values
    ]
    assert found[0] == found[1] == 1.0
    assert found[-1] == found[-2] == 0.0
    singles = array("f", [priority or 0.0 for priority in found[1:-1]]).tolist()
    assert singles == sorted(set(singles), reverse=True)


def test_phases_of_executor_end_with_the_first_token() -> None:
    at = dict(
        zip(
            TIMES,
            (timedelta(seconds=time_s) for time_s in (10.0, 10.5, 10.5, 10.75, 11.0)),
            strict=True,
        )
    )
    prefill = reported_phases(SimpleNamespace(**at), fetches_kv=False)
    assert prefill == pytest.approx({"queue": 0.5, "prefill": 0.5})
    decode = reported_phases(SimpleNamespace(**at), fetches_kv=True)
    assert decode == pytest.approx({"queue": 0.5, "kv_transfer": 0.25, "first_token": 0.25})


@pytest.mark.parametrize("name", TIMES)
def test_phases_when_a_time_is_missing_then_none_is_reported(name: str) -> None:
    at = {time_s: timedelta(seconds=1) for time_s in TIMES}
    for times in (
        SimpleNamespace(**at | {name: timedelta()}),
        SimpleNamespace(**at | {name: None}),
    ):
        reported = [reported_phases(times, fetches_kv=fetches_kv) for fetches_kv in (False, True)]
        assert {} in reported
    del at[name]
    assert {} in [
        reported_phases(SimpleNamespace(**at), fetches_kv=fetches_kv)
        for fetches_kv in (False, True)
    ]
