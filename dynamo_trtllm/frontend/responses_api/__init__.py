"""Implement `/v1/responses`: its input items, output items, events and stored responses."""
