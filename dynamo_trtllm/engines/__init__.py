"""Engines: token ids in, token ids out. A vendor lives in its own folder; nothing here knows a network or HTTP."""
