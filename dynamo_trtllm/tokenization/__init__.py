"""Conversation to token ids, token ids to reasoning, content and tool calls. Pure; knows no HTTP and no engine."""
