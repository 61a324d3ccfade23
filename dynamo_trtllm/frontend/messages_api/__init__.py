"""Implement `/v1/messages`: content blocks to a conversation, and deltas to blocks and events."""
