"""Plants wrong assumptions about TensorRT-LLM in the adapter, each of which a contract test finds.

As a plugin of pytest (`-p tests.kit.planted_assumptions`), replaces the text that the environment
variable PLANTED names in one module.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import NamedTuple

_TRTLLM = "dynamo_trtllm.engines.trtllm"


class Plant(NamedTuple):
    """A wrong assumption: text of a module, what it becomes, and the contract test that fails
    then.
    """

    topic: str  # of docs/trtllm-verification.md
    assumes: str
    module: str
    old: str
    new: str
    test: str  # in tests


_ANSWERS = "contract/test_engine_trtllm.py::test_answers_of_any_release_equal_the_torch_engine"
_FIELD = (
    "contract/test_engine_trtllm_sampling.py::test_field_that_sampler_ignores_is_rejected_by_name"
)
_KV_EVENTS = (
    "contract/test_engine_trtllm_kv_events.py::test_events_show_prompt_prefixes_until_removed"
)

PLANTS = (
    Plant(
        "Python transceiver",
        "every context-only answer has an `opaque_state`",
        f"{_TRTLLM}.transfer_params",
        "if not any(params.get(name) for name in _PLACES):",
        'if not params.get("opaque_state"):',
        f"{_ANSWERS}[1.3.0rc29-NIXL]",
    ),
    Plant(
        "Python transceiver",
        "`ctx_dp_rank` need not reach the decode call",
        f"{_TRTLLM}.bindings",
        '*LIBRARY.optional["DisaggregatedParams"]}',
        '*LIBRARY.optional["DisaggregatedParams"]} - {"ctx_dp_rank"}',
        f"{_ANSWERS}[1.3.0rc29-NIXL]",
    ),
    Plant(
        "Python transceiver",
        "1.3 runs UCX without `transceiver_runtime: CPP`",
        f"{_TRTLLM}.args",
        'values[_RUNTIME] = "CPP"',
        "pass",
        f"{_ANSWERS}[1.3.0rc29-UCX]",
    ),
    Plant(
        "Python transceiver",
        "KV of one release can be read by another",
        f"{_TRTLLM}.engine",
        'values = {"release": line,',
        'values = {"release": "1",',
        "contract/test_engine_trtllm.py::test_transfer_of_another_release_is_rejected_by_name",
    ),
    Plant(
        "KV that is never fetched",
        "an abort frees the KV of a finished context-only call",
        f"{_TRTLLM}.library",
        "return self._last_result_at + self._library.kv_timeout_s",
        "return None",
        "contract/test_engine_trtllm_cancellation.py::"
        "test_aborted_transfer_holds_kv_until_library_timeout[1.2.1]",
    ),
    Plant(
        "KV that is never fetched",
        "releases without a timeout free KV as well",
        f"{_TRTLLM}.engine",
        "return math.inf if timeout_ms is None else timeout_ms / 1000",
        "return 0.1 if timeout_ms is None else timeout_ms / 1000",
        "contract/test_engine_trtllm_cancellation.py::"
        "test_aborted_transfer_is_leaked_when_kv_is_never_freed[1.1.0]",
    ),
    Plant(
        "KV that is never fetched",
        "a prefill call whose first token is a stop word ends with `stop`",
        "dynamo_trtllm.engines.external.runner",
        "if chunk.token_ids and chunk.token_ids[-1] in call.stop_ids:",
        "if False:",
        "contract/test_engine_trtllm_cancellation.py::"
        "test_prefill_ended_by_stop_word_holds_kv_until_timeout",
    ),
    Plant(
        "KV that is never fetched",
        "a decode call that is cancelled before its submission leaves no KV behind",
        "dynamo_trtllm.engines.external.runner",
        "if self.has_ended and not self._must_fetch_kv:",
        "if self.has_ended:",
        "contract/test_engine_trtllm_cancellation.py::"
        "test_decode_cancelled_before_submission_frees_prefill_kv[1.2.1-UCX-0]",
    ),
    Plant(
        "Dead prefill worker",
        "a decode call whose peer is gone fails by itself",
        f"{_TRTLLM}.library",
        "await library.probe.check(endpoint)",
        "pass",
        "contract/test_engine_trtllm_dead_peer.py::"
        "test_decode_when_prefill_worker_is_gone_then_transfer_failed",
    ),
    Plant(
        "Log-probabilities of a decode call",
        "every release transfers the first token's",
        f"{_TRTLLM}.engine",
        'if facts.is_disaggregated and "first_gen_log_probs" not in bindings.disagg_fields:',
        "if False:",
        "contract/test_engine_trtllm_sampling.py::"
        "test_logprobs_are_rejected_where_first_token_has_none[1.2.1]",
    ),
    Plant(
        "Log-probabilities of a decode call",
        "an entry is always a mapping, never a number",
        "dynamo_trtllm.engines.external.library",
        "if not isinstance(entry, Mapping):",
        "if False:",
        "contract/test_engine_trtllm.py::test_answers_when_traps_are_turned_then_the_same",
    ),
    Plant(
        "min_tokens",
        "the PyTorch sampler of every release obeys it",
        f"{_TRTLLM}.model_limits",
        "has_old_sampler = not has_torch_sampler(facts.args)",
        "has_old_sampler = True",
        f"{_FIELD}[1.2.1]",
    ),
    Plant(
        "ignore_eos",
        "with it the request's own stop tokens still stop",
        f"{_TRTLLM}.requests",
        'values |= {"end_id": NO_END, "ignore_eos": False}',
        "pass",
        "contract/test_engine_trtllm_sampling.py::"
        "test_stop_token_still_stops_when_model_stops_are_ignored[1.3.0rc29]",
    ),
    Plant(
        "Statistics",
        "`get_stats` raises RuntimeError only",
        f"{_TRTLLM}.reports.polling",
        "except Exception as exc:  # noqa: BLE001 - logged, and tried again",
        "except RuntimeError as exc:",
        "contract/test_engine_trtllm_statistics.py::test_statistics_continue_after_failure[1.1.0]",
    ),
    Plant(
        "Statistics",
        "with attention DP a row has the KV blocks of all ranks",
        f"{_TRTLLM}.reports.statistics",
        "kv_blocks_total=total * num_ranks // len(rows)",
        "kv_blocks_total=total // len(rows)",
        "contract/test_engine_trtllm_statistics.py::test_statistics_count_kv_of_all_data_parallel_ranks[1.2.1]",
    ),
    Plant(
        "Model defaults",
        "the KV blocks of an engine have the size that the arguments say",
        f"{_TRTLLM}.reports.kv_cache",
        "assumed = facts.block_tokens\n    actual = reported.block_tokens",
        "assumed = facts.block_tokens\n    actual = assumed",
        "contract/test_engine_trtllm_kv_cache.py::"
        "test_start_reports_block_size_that_the_model_chooses[1.3.0rc29]",
    ),
    Plant(
        "KV events",
        "the hashes of blocks are numbers",
        f"{_TRTLLM}.reports.kv_events",
        "if isinstance(name, int):\n        return name",
        "return int(name)",
        f"{_KV_EVENTS}[1.3.0rc29]",
    ),
    Plant(
        "KV events",
        "layer groups have different attention windows",
        f"{_TRTLLM}.reports.kv_events",
        "others = holders.pop(name, 0) & ~(1 << place.layer_group)",
        "others = 0",
        f"{_KV_EVENTS}[1.3.0rc29]",
    ),
    Plant(
        "Classes of errors",
        "what a wait for a result raises is a rejection of the request",
        f"{_TRTLLM}.library",
        'if self._is_healthy() and isinstance(exc, self.bindings.classes["RequestError"]):',
        "if self._is_healthy():",
        "contract/test_engine_trtllm.py::test_result_when_the_call_for_it_fails_then_no_rejection",
    ),
    Plant(
        "Classes of errors",
        "an abort raises AssertionError only",
        f"{_TRTLLM}.library",
        "except Exception as exc:  # noqa: BLE001 - the errors of its queues and RPCs have no"
        " common base class",
        "except AssertionError as exc:",
        "contract/test_engine_trtllm_cancellation.py::test_cancel_when_abort_raises_then_request_ends_by_itself",
    ),
    Plant(
        "Dead rank",
        "`generate_async` never blocks the event loop",
        f"{_TRTLLM}.engine",
        "self._watchdog.start()",
        "pass",
        "contract/test_engine_trtllm_watchdog.py::test_submission_blocked_by_dead_rank_ends_the_process[1.2.1]",
    ),
    Plant(
        "Ignored sampling fields",
        "the PyTorch sampler of every release applies penalties and `min_p`",
        f"{_TRTLLM}.engine",
        'features += [*_PENALTIES, "min_p"]',
        "pass",
        f"{_FIELD}[1.2.1]",
    ),
    Plant(
        "Ignored sampling fields",
        "every candidate of 1.3 applies `seed`",
        f"{_TRTLLM}.engine",
        "if not facts.is_at_least_candidate(_SEED_SINCE):",
        "if False:",
        f"{_FIELD}[1.3.0rc25]",
    ),
    Plant(
        "Speculative decoding",
        "every release takes `speculative_config` as a dictionary",
        f"{_TRTLLM}.bindings",
        "if not given or self.is_since_1_3:",
        "if True:",
        "contract/test_engine_trtllm_arguments.py::"
        "test_start_uses_the_class_that_config_names[1.2.1]",
    ),
    Plant(
        "TRITON experts",
        "TRITON is right for Hopper in every release",
        f"{_TRTLLM}.args",
        'if leaf.value == "TRITON" and schema.default(release, key, {}) == "AUTO":',
        "if False:",
        "unit/engines/trtllm/test_preflight_experts.py::"
        "test_args_omit_experts_that_the_release_deprecates",
    ),
    Plant(
        "Smaller ones",
        "the executor's shutdown after an error does not wait",
        f"{_TRTLLM}.bindings",
        "executor.shutdown = _off_event_loop(executor.shutdown)",
        "pass",
        "contract/test_engine_trtllm_arguments.py::"
        "test_shutdown_after_executor_error_is_off_the_event_loop[1.2.1]",
    ),
    Plant(
        "Smaller ones",
        "a stop token that is the last allowed one ends the output with `stop`",
        f"{_TRTLLM}.library",
        'if finish == "length" and self._last_token in self.stop_ids:',
        "if False:",
        "contract/test_engine_trtllm_sampling.py::"
        "test_stop_token_as_last_allowed_token_finishes_with_stop[1.2.1]",
    ),
    Plant(
        "Smaller ones",
        "a context-only answer repeats the `disagg_request_id` of its call",
        f"{_TRTLLM}.library",
        'if not values.get("disagg_request_id") and "disagg_request_id" in given:',
        "if False:",
        f"{_ANSWERS}[1.3.0rc29-NIXL]",
    ),
    Plant(
        "Results",
        "`token_ids` has only the tokens of the last step",
        f"{_TRTLLM}.library",
        "new = list(output.token_ids[start:])",
        "new = list(output.token_ids)",
        f"{_ANSWERS}[1.2.1-UCX]",
    ),
    Plant(
        "Results",
        "the token that ended an output is always in `token_ids`",
        f"{_TRTLLM}.library",
        'if output.finish_reason == "stop":',
        "if False:",
        "contract/test_engine_trtllm.py::test_answers_when_traps_are_turned_then_the_same",
    ),
)


class _PlantedLoader(SourceFileLoader):
    def __init__(self, name: str, path: str, old: str, new: str) -> None:
        super().__init__(name, path)
        self._old = old
        self._new = new

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname) or ""
        assert source.count(self._old) == 1, (
            f"{fullname} has the text {source.count(self._old)} times: {self._old}"
        )
        return compile(source.replace(self._old, self._new), self.path, "exec")


class _Planter:
    """Finds one module, and loads it with another text."""

    def __init__(self, module: str, old: str, new: str) -> None:
        self._module = module
        self._old = old
        self._new = new

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._module:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _PlantedLoader(name, spec.origin, self._old, self._new)
        return spec


if "PLANTED" in os.environ:
    sys.meta_path.insert(0, _Planter(*json.loads(os.environ["PLANTED"])))
