"""What layers with a sliding window, and those that see by chunks, no longer need."""


class SlidingWindowManager:
    def __init__(self, sliding_window: int) -> None:
        self.sliding_window = sliding_window

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.sliding_window + 1)


class ChunkedLocalAttentionManager:
    def __init__(self, attention_chunk_size: int) -> None:
        self.attention_chunk_size = attention_chunk_size

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.attention_chunk_size * self.attention_chunk_size
