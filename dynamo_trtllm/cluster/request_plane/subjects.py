"""Name the subjects of the request plane."""

from __future__ import annotations


def control_subject(subject: str) -> str:
    """Return the control subject of the instance with this generate subject."""
    return f"{subject}.control"


def load_subject(namespace: str) -> str:
    """Return the subject at which a namespace's workers publish their load to all frontends."""
    return f"{namespace}.load"
