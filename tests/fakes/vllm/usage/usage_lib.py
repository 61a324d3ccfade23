from __future__ import annotations

import enum


class UsageContext(enum.StrEnum):
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"
