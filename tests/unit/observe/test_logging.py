import logging

import pytest

from dynamo_trtllm.observe.logging import request_id, setup


@pytest.fixture
def log(capsys):
    """What was logged, as a function; the root logger is put back afterwards."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield lambda: capsys.readouterr().err
    logging.captureWarnings(False)
    logging.getLogger("uvicorn.access").disabled = False
    logging.getLogger("dynamo_trtllm").setLevel(logging.NOTSET)
    root.handlers[:] = before
    root.setLevel(level)


def test_setup_when_a_request_is_served_then_its_id_and_process_are_on_the_line(log):
    setup("info", "prefill-1")
    token = request_id.set("req-7")
    logging.getLogger("dynamo_trtllm.worker").info("leg %d", 1)
    request_id.reset(token)
    logging.getLogger("dynamo_trtllm.worker").info("idle")
    first, second = log().splitlines()
    assert first.endswith("INFO prefill-1 req-7 dynamo_trtllm.worker: leg 1")
    assert second.endswith("INFO prefill-1 - dynamo_trtllm.worker: idle")


def test_setup_when_called_twice_then_lines_come_once_at_the_new_level(log):
    setup("debug", "a")
    setup("warning", "b")
    logging.getLogger("dynamo_trtllm.x").info("hidden")
    logging.getLogger("dynamo_trtllm.x").warning("seen")
    assert [line.split(" ", 1)[1] for line in log().splitlines()] == ["WARNING b - dynamo_trtllm.x: seen"]


def test_setup_when_level_is_info_then_other_packages_speak_from_warnings_on(log):
    setup("info", "a")
    logging.getLogger("nats").info("hidden")
    logging.getLogger("uvicorn.access").warning("hidden")
    logging.getLogger("nats").warning("seen")
    assert log().count("\n") == 1
