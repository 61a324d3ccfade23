"""Read the KV of all tokens of a prompt but the last one.

A decode engine of vLLM reads the whole prompt and then steps back by one token, so that it has one
token to compute (`_update_waiting_for_remote_kv`). The last token of a decode call's prompt may
need a block which the prefill engine does not have. The connector pairs the blocks of both engines
from the end, and an assertion ends the engine.
"""

from dynamo_trtllm.engines.vllm.patches.patch import Patch
from dynamo_trtllm.protocol.number_types import ceil_div

PATCH = Patch(
    name="last_token",
    fault="a decode engine dies when it has allocated more blocks than the prefill engine holds",
    upstream="https://github.com/vllm-project/vllm/pull/50558",
    needed_in="all",
    detection="always on; `NixlConnector.get_num_new_matched_tokens` exists in all releases",
    goes="when vLLM pairs blocks by position and allocates none beyond those of the prefill engine",
    is_vital=True,
)


def num_remote_tokens(prompt_tokens: int, held_tokens: int, block_tokens: int) -> int:
    """Return how many tokens of KV a decode engine reads from the prefill engine.

    The last token of the prompt is computed, not read, because it may be in a block of its own that
    the prefill engine does not have.

    There is one exception: the connector pairs blocks from the end, so all blocks that the prefill
    engine has must be read. If one block fewer would be read without the last token, this token is
    read, too.

    Args:
        prompt_tokens: the length of the decode call's prompt.
        held_tokens: the tokens whose KV the prefill engine has.
        block_tokens: the tokens per KV block.
    """
    wanted = min(prompt_tokens - 1, held_tokens)
    if ceil_div(wanted, block_tokens) == ceil_div(held_tokens, block_tokens):
        return wanted
    return min(prompt_tokens, held_tokens)
