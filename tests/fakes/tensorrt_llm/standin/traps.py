"""Every behaviour of TensorRT-LLM that an adapter may stumble over, as a switch with a name.

Those that every release has are on; what happens sometimes is off. `STANDIN_TRAPS=name,-name`
switches for a process, `turned` for a block.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tensorrt_llm.standin.release import LINE, is_before


@dataclass(frozen=True, slots=True)
class Trap:
    is_on: bool  # unless switched
    says: str


TRAPS = {
    # how results look
    "forces_max_tokens": Trap(True, "context_only sets max_tokens = 1 on the caller's object"),
    "setup_changes_caller": Trap(
        True, "with end_id None, end_id and stop_token_ids are set on the caller's object"
    ),
    "same_object": Trap(True, "every step yields the same result object, changed"),
    "new_outputs": Trap(
        False, "outputs[0] is another object after each step, as with post-processing workers"
    ),
    "last_stop_word_is_length": Trap(
        True, "a stop word as the last allowed token ends the request with 'length'"
    ),
    "stop_words_cut": Trap(
        True, "a stop token is cut from token_ids after earlier steps may have shown it"
    ),
    "stop_words_shown_first": Trap(
        False, "a step shows the stop token before the last one cuts it"
    ),
    "end_id_cut": Trap(False, "the end id is not in token_ids"),
    "empty_last_step": Trap(False, "the step with finish_reason brings no token"),
    "bursts": Trap(False, "a step brings four tokens whatever stream_interval says"),
    "first_with_second": Trap(False, "a decode's first step brings two tokens"),
    "not_finished": Trap(False, "context_only ends with 'not_finished' instead of 'length'"),
    "flat_logprobs": Trap(False, "logprobs are plain floats, one per token"),
    "decode_first_logprob": Trap(
        LINE >= (1, 3), "a decode's logprobs begin with the first token's"
    ),
    "big_ids": Trap(True, "request ids need 63 bits"),
    "draft_tokens": Trap(
        False, "context_only answers with draft tokens, which decode must be given"
    ),
    "logprobs_asserted": Trap(
        LINE < (1, 3), "a decode with log-probabilities fails: its first token has none"
    ),
    # what is ignored
    "min_tokens_ignored": Trap(
        is_before((1, 3), 24), "min_tokens has no effect with the PyTorch sampler"
    ),
    "min_p_ignored": Trap(is_before((1, 3), 24), "min_p has no effect with the PyTorch sampler"),
    "penalties_ignored": Trap(
        is_before((1, 3), 24), "penalties have no effect with the PyTorch sampler"
    ),
    "seed_ignored": Trap(
        is_before((1, 3), 27), "a request's seed has no effect with the PyTorch sampler"
    ),
    "ignore_eos_drops_stop_words": Trap(
        LINE >= (1, 3), "with ignore_eos no stop token ends a request"
    ),
    # calls that are refused, requests that fail
    "context_refuses_overlap": Trap(
        LINE < (1, 2), "context_only fails where the overlap scheduler is on"
    ),
    "refused_at_call": Trap(False, "generate_async itself raises RequestError"),
    "unsupported_at_call": Trap(
        False, "generate_async itself raises NotImplementedError, for a request alone"
    ),
    "request_fails": Trap(False, "a request fails after its first token, alone"),
    "transfer_fails": Trap(False, "a decode fails because its KV did not come, alone"),
    "step_fails": Trap(
        False, "a step fails: all active requests fail with one message, the executor lives"
    ),
    "executor_dies": Trap(
        False, "a step fails fatally: all requests fail, the executor is shut down"
    ),
    "result_call_fails": Trap(
        False, "a wait for a result raises an error of the remote call, no RequestError"
    ),
    "dies_of_long": Trap(
        False, "as executor_dies, at a request that may make more than 1000 tokens"
    ),
    "finishes_timeout": Trap(False, "requests end with finish_reason 'timeout'"),
    "no_context_params": Trap(False, "a context_only answer has no disaggregated_params"),
    "no_disagg_id": Trap(
        False, "a context_only answer lacks the disagg_request_id that it was asked with"
    ),
    "dead_peer_blocks": Trap(
        True, "a Python transceiver asks a peer that is gone again and again: the engine stands"
    ),
    # what never comes
    "never_answers": Trap(False, "a request gets no answer"),
    "transfer_hangs": Trap(False, "a decode waits for its KV for ever"),
    "abort_never_answers": Trap(False, "an aborted request ends without a word"),
    "abort_drops_waiting": Trap(
        True, "an aborted request that still waits for a place ends without a word"
    ),
    "abort_lost": Trap(False, "an abort has no effect: tokens go on (attention DP)"),
    "abort_fails": Trap(False, "an abort raises an error of the remote call, and has no effect"),
    "abort_slow": Trap(False, "an abort takes effect after 0.3 s"),
    "abort_keeps_context": Trap(
        True, "an abort after a context-only answer does nothing: a time-out frees the KV"
    ),
    "submit_blocks": Trap(
        False,
        "generate_async finds that a rank has just died, and blocks for ever in its send: at a"
        " request that may make more than 1000 tokens",
    ),
    # what a model class chooses
    "model_defaults": Trap(
        False, "unless they are set: FLASHINFER, which the model needs, and blocks of 64 tokens"
    ),
    "block_size_fixed": Trap(False, "the blocks that a model class prefers, whatever is set"),
    "no_block_size": Trap(
        False, "statistics have no tokensPerBlock (not established for all candidates of 1.3)"
    ),
    # around requests
    "no_request_id": Trap(False, "a result has no request_id (not read in 1.1 and in candidates)"),
    "stats_stale": Trap(
        False, "no statistics after the last request ended: the last row still shows it"
    ),
    "stats_fail": Trap(False, "get_stats raises RuntimeError"),
    "stats_rpc_fails": Trap(
        False, "get_stats is a remote call that fails, with an error of the package"
    ),
    "sync_reads_lose": Trap(
        LINE < (1, 2),
        "get_stats and get_kv_cache_events read until nothing comes, and then raise TypeError",
    ),
    "text_hashes": Trap(
        not is_before((1, 3), 24),
        "with the hash algorithms auto and v2_sha256, KV events name blocks by text",
    ),
    "layer_groups": Trap(
        not is_before((1, 3), 24),
        "KV events are of two layer groups with one window, of which the second keeps less",
    ),
    "malformed_event": Trap(False, "KV events have no data"),
    "wakeup_fails": Trap(False, "waking up fails: the GPU memory was taken by another process"),
    "start_fails": Trap(False, "the constructor raises"),
    "error_shuts_down": Trap(
        True, "an error that ends the executor shuts it down in the thread that reads a result"
    ),
    "shutdown_hangs": Trap(False, "shutdown takes half a second"),
}

_switched: dict[str, bool] = {}


def is_on(name: str) -> bool:
    return _switched.get(name, TRAPS[name].is_on)


@contextmanager
def turned(*names: str) -> Iterator[None]:
    """Within the block each `name` is on and each `-name` off.

    Raises ValueError for an unknown one.
    """
    before = dict(_switched)
    _switch(names)
    try:
        yield
    finally:
        _switched.clear()
        _switched.update(before)


def flipped(name: str) -> str:
    """What `turned` takes to have it the other way round."""
    return f"-{name}" if TRAPS[name].is_on else name


def _switch(names: tuple[str, ...]) -> None:
    for text in names:
        name = text.removeprefix("-")
        if name not in TRAPS:
            raise ValueError(f"there is no trap {name!r}; there are {', '.join(TRAPS)}")
        _switched[name] = name == text


_switch(tuple(name for name in os.environ.get("STANDIN_TRAPS", "").split(",") if name))
