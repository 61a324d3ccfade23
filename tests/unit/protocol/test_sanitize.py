"""Text that others wrote, made safe to show: what is masked, and that it costs no more than its
size.
"""

from __future__ import annotations

import pytest

from dynamo_trtllm.protocol.errors import Unreachable
from dynamo_trtllm.protocol.sanitize import mask_credentials
from tests.kit.cases import each_case


@each_case(
    ("text", "masked"),
    [
        (
            "no server at nats://user:secret@host:4222; start one",
            "no server at nats://***@host:4222; start one",
        ),
        ("(tls://token@host)", "(tls://***@host)"),
        ("'user:secret@host'", "'***@host'"),
        ("nats://a:secret@h:1,nats://b:secret@i:2", "nats://***@i:2"),
        ("nats://user:p@secret@host", "nats://***@host"),
        ("nats://***@host", "nats://***@host"),
        ("mail ops@example.com", "mail ops@example.com"),
        ("http://localhost:8000", "http://localhost:8000"),
        (
            "key -----BEGIN PRIVATE KEY-----\nsecret\n-----END PRIVATE KEY----- end",
            "key -----BEGIN PRIVATE KEY----- *** -----END PRIVATE KEY----- end",
        ),
        ("-----BEGIN RSA PRIVATE KEY-----\nsecret", "-----BEGIN RSA PRIVATE KEY----- *** "),
    ],
)
def test_credentials_in_text_are_masked(text: str, masked: str) -> None:
    assert mask_credentials(text) == masked
    assert Unreachable(text).message == masked


@pytest.mark.parametrize("piece", ["a:", "://", "a@b:", "-----BEGIN A-----", "x,x:'"])
def test_text_of_megabytes_then_masking_takes_time_in_proportion(piece: str) -> None:
    """A quadratic search would run into the suite's timeout."""
    mask_credentials(piece * 100_000 + "@")
