"""Compute how many choices the workers of a model can take, from what the workers register."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from dynamo_trtllm.frontend.routing.cluster_view import ModelView
from dynamo_trtllm.protocol.messages import Instance, Role
from dynamo_trtllm.protocol.mixed_steps import least_chunk_tokens
from dynamo_trtllm.protocol.number_types import ceil_div

# The workers can take choices whose costs add up to this. Costs are integers, because rounding
# errors of their sum would stay for ever.
WINDOW: Final = 1 << 20
# Limit of the choices of a step that are counted. Steps may have more choices, but a worker for
# which this many wait is never idle.
_MAX_STEP_CHOICES: Final = 64
# Waiting prompts may take a quarter of the KV blocks. They may not take more, because workers
# reject prompts when half of the blocks are taken, and other frontends send prompts, too.
_KV_DIVISOR: Final = 4
# While the batches of the decode workers are full, some more choices are prefilled, so that they
# can use the slots that become free. Their number is the batch size divided by _AHEAD_DIVISOR, but
# at least _MIN_AHEAD.
_AHEAD_DIVISOR: Final = 8
_MIN_AHEAD: Final = 2


class ChoiceCosts(NamedTuple):
    """What one choice takes of the three stages of a start window, as parts of WINDOW."""

    prefill: int  # taken until the prompt of the choice is computed
    start: int  # taken until the first answer of its decode call
    run: int  # taken until its end


FREE: Final = ChoiceCosts(0, 0, 0)  # the costs of a choice that takes nothing


class _Limit(NamedTuple):
    """How many choices the workers can take. 0: not limited, or not known."""

    num_choices: int
    tokens: int = 0  # how many tokens the prompts of these choices may have together
    block_tokens: int = 1  # a prompt takes whole blocks of this size
    num_prompts: int = 1  # how many prompts the workers can take, even of more tokens together

    def cost(self, prompt_tokens: int) -> int:
        """Return the part of WINDOW that a choice takes.

        It is the larger one of two parts: the part of one choice among `num_choices`, and the part
        of the tokens of its prompt among `tokens`.
        """
        cost = 0
        if self.num_choices:
            # The part is rounded down, so that `num_choices` choices fit.
            cost = max(1, WINDOW // self.num_choices)
        if not self.tokens:
            return cost
        tokens = ceil_div(prompt_tokens, self.block_tokens) * self.block_tokens
        tokens_cost = WINDOW * tokens // self.tokens
        return max(cost, min(tokens_cost, WINDOW // self.num_prompts))


class WorkerCapacity(NamedTuple):
    """What the workers of a model can take."""

    prefill: _Limit
    start: _Limit
    run: _Limit

    def costs(self, prompt_tokens: int, computed_tokens: int) -> ChoiceCosts:
        """Return what a choice takes.

        Args:
            prompt_tokens: tokens of its prompt.
            computed_tokens: tokens of its prompt that are probably in no prefix cache.
        """
        return ChoiceCosts(
            self.prefill.cost(computed_tokens),
            self.start.cost(prompt_tokens),
            self.run.cost(prompt_tokens),
        )


def capacity(view: ModelView, *, uses_all_paths: bool = False) -> WorkerCapacity | None:
    """Return what the workers can take; None if there are none. The result is cached in the view.

    Without workers, the router waits for some, or rejects the request.

    Args:
        view: the workers of a model.
        uses_all_paths: the router lets prefill and decode workers run whole requests, if they can.
    """
    key = "capacity", uses_all_paths
    if key not in view.cache:
        view.cache[key] = _new_capacity(view.sharing(), uses_all_paths=uses_all_paths)
    cached: WorkerCapacity | None = view.cache[key]
    return cached


def _new_capacity(view: ModelView, *, uses_all_paths: bool) -> WorkerCapacity | None:
    has_pairs = bool(view.prefill and view.decode)
    prefill = view.prefill
    decode = view.decode
    if not has_pairs:
        # Whole requests run on aggregated workers, and without these on decode workers.
        prefill = view.aggregated or view.decode
        decode = prefill
    elif uses_all_paths:
        can_aggregate = [*view.aggregated]
        can_aggregate += [worker for worker in view.prefill if worker.can_aggregate]
        can_aggregate += [worker for worker in view.decode if worker.can_aggregate]
        prefill = _united(view.prefill, can_aggregate)
        decode = _united(view.decode, can_aggregate)
    if not prefill:
        return None
    # While one step runs, the choices of the next step wait.
    in_prefill = 2 * sum(_step_choices(worker) for worker in prefill)
    # The KV of these choices is being transferred, or waits for a step.
    in_transfer = sum(_step_choices(worker) for worker in decode) if has_pairs else 0
    # Two prompts of any length can wait at each worker: otherwise a worker would be idle after each
    # long one.
    num_prompts = 2 * len(prefill)
    step_tokens = [worker.limits.max_num_tokens for worker in prefill]
    if has_pairs:
        # Elastic workers that get only decode calls compute few whole requests, beside streams. If
        # prompts were counted for these workers, too, most of them would wait at the other workers.
        computing = {worker.id for worker in view.prefill}
        elastic = {worker.id for worker in prefill if worker.role is Role.ELASTIC}
        without_prompts = elastic - computing
        num_prompts -= len(without_prompts)
        step_tokens = [
            least_chunk_tokens(tokens) if tokens and worker.id in without_prompts else tokens
            for worker, tokens in zip(prefill, step_tokens, strict=True)
        ]
    return WorkerCapacity(
        prefill=_Limit(in_prefill, 2 * _sum_if_known(step_tokens), num_prompts=num_prompts),
        start=_Limit(
            in_prefill + in_transfer,
            _kv_tokens(prefill) // _KV_DIVISOR,
            _block_tokens(prefill),
            num_prompts,
        ),
        run=_Limit(
            _sum_if_known([_slots(worker) for worker in decode]),
            _kv_tokens(decode),
            _block_tokens(decode),
            2 * len(decode),
        ),
    )


def _united(workers: Sequence[Instance], others: Sequence[Instance]) -> tuple[Instance, ...]:
    """Return all workers of both sequences, each once."""
    by_id = {worker.id: worker for worker in (*workers, *others)}
    return tuple(by_id.values())


def _step_choices(worker: Instance) -> int:
    """Return how many choices a step of a worker has at most."""
    return min(worker.limits.max_batch_size or _MAX_STEP_CHOICES, _MAX_STEP_CHOICES)


def _slots(worker: Instance) -> int:
    """Return how many choices run and wait at a worker that is never idle; 0: not known."""
    batch_size = worker.limits.max_batch_size
    if not batch_size:
        return 0
    return batch_size + max(_MIN_AHEAD, batch_size // _AHEAD_DIVISOR)


def _kv_tokens(workers: Sequence[Instance]) -> int:
    """Return for how many tokens the workers have KV blocks; 0: not known."""
    return _sum_if_known(
        [worker.limits.kv_blocks * worker.layout.block_tokens for worker in workers]
    )


def _block_tokens(workers: Sequence[Instance]) -> int:
    return max(1, *(worker.layout.block_tokens for worker in workers))


def _sum_if_known(numbers: Sequence[int]) -> int:
    """Return the sum of what the workers report; 0 if one of them does not report it."""
    return sum(numbers) if all(numbers) else 0
