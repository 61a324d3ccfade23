"""What a layer with a sliding window no longer needs."""


class SlidingWindowManager:
    def __init__(self, sliding_window: int) -> None:
        self.sliding_window = sliding_window

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.sliding_window + 1)
