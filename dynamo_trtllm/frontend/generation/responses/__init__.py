"""Implement `/v1/responses`: input items to a conversation, deltas to output items and events,
stored responses.
"""
