"""Run generation requests: prompt and plan, prefill and decode calls, text and events."""
