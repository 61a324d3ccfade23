"""`/v1/responses`: items to a conversation, pieces to items and events, and the responses that are kept."""
