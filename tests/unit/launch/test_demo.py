from __future__ import annotations

import json
import shlex
from contextlib import nullcontext
from pathlib import Path

import pytest

from dynamo_trtllm.config import load as loading
from dynamo_trtllm.config.deployment import checked_deployment, load_deployment
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.launch import demonstration, main
from dynamo_trtllm.launch.process_specs import processes
from dynamo_trtllm.launch.running_deployments import LaunchRecord
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.subprocesses import RunFailed
from tests.kit.fake_children import answering, http

STATS = {
    "prefill_instance": "a1",
    "decode_instance": "b2",
    "kv_bytes": 12345,
    "transport": "tcp",
    "ttft_s": 0.25,
    "tokens_per_s": 80.4,
    "phase_s": {"queue": 0.001, "prefill": 0.2},
}


def answer(**stats):
    message = {"role": "assistant", "content": "Two\nlines.", "reasoning_content": "Think."}
    return {"choices": [{"message": message}], "dynamo_trtllm": STATS | stats}


def test_report_when_answer_came_then_all_that_happened_is_named():
    text = demonstration.sample_report(answer(), "m", {"a1": "prefill", "b2": "decode-2"})
    for part in (
        "Think.",
        "Two lines.",
        "prefill (instance a1)",
        "decode-2 (instance b2)",
        "12,345 bytes over tcp",
    ):
        assert part in text
    assert "250 ms" in text
    assert "80 tokens/s" in text
    assert "prefill 200 ms" in text


def test_report_without_prefill_worker_or_rate_says_so():
    text = demonstration.sample_report(
        answer(prefill_instance=None, tokens_per_s=None, decode_instance="c3"), "m", {}
    )
    assert "prefill by: none" in text
    assert "tokens/s" not in text
    assert "a worker of another deployment (instance c3)" in text


def test_report_of_mock_engine_says_text_is_random():
    assert "random" in demonstration.sample_report(answer(), "m", {}, is_mock=True)
    assert "random" not in demonstration.sample_report(answer(), "m", {})


@pytest.mark.parametrize(
    ("model", "question"),
    [("smollm2", "What is the capital of France?"), ("m", demonstration.PROMPT)],
)
def test_question_has_the_same_answer_each_time(model, question):
    sent = demonstration.sample_request(model)
    assert (sent["temperature"], sent["messages"][0]["content"]) == (0, question)
    assert f"question:   {question}" in demonstration.sample_report(answer(), model, {})


def test_next_step_is_the_guides_streaming_request():
    words = shlex.split(
        demonstration.next_step("http://localhost:8000", "tiny-gpt-oss").splitlines()[-1]
    )
    assert words[:3] == ["curl", "-N", "http://localhost:8000/v1/chat/completions"]
    sent = json.loads(words[-1])
    assert sent == demonstration.sample_request("tiny-gpt-oss") | {"stream": True}
    assert sent["max_tokens"] == 200


async def test_ask_when_the_model_is_ready_later_then_the_answer_comes():
    not_yet = http(503, '{"reason": "loading"}')
    now = http(200, '{"status": "ready"}')
    with answering(not_yet, now, http(200, json.dumps(answer()))) as port:
        assert await demonstration.ask_sample(f"http://localhost:{port}", "m") == answer()


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([http(503, "loading")], "model m was not ready within 0.3 s: status 503: loading"),
        (
            [http(200, "{}"), http(400, "no such field")],
            "the demo request failed: status 400: no such field",
        ),
        ([http(200, "{}"), b"no HTTP\r\n\r\n"], "the demo request failed: .*can't be parsed"),
        ([http(200, "{}"), b""], "the demo request failed: no response"),
    ],
)
async def test_ask_when_it_fails_then_the_reason_is_given(monkeypatch, answers, why):
    monkeypatch.setattr(demonstration, "_MODEL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(demonstration, "_ANSWER_TIMEOUT_S", 0.3)
    with answering(*answers) as port, pytest.raises(RunFailed, match=why):
        await demonstration.ask_sample(f"http://127.0.0.1:{port}", "m")


class Supervised:
    """A supervised deployment that serves, or is stopped before it does."""

    serves = True

    def __init__(self, *_: object) -> None:
        pass

    async def run(self, on_ready) -> None:
        if self.serves:
            await on_ready(LaunchRecord(pid=1, namespace="n"))


@pytest.mark.parametrize(("host", "is_printed"), [("0.0.0.0", True), ("127.0.0.1", False)])
async def test_demo_prints_a_key_only_if_others_can_connect(
    monkeypatch, capsys, host: str, is_printed: bool
) -> None:
    environs: list[dict[str, str]] = []

    class Noted(Supervised):
        def __init__(self, deployment, specs, output, environ) -> None:
            environs.append(environ)

    monkeypatch.setattr(main, "Launcher", Noted)
    deployment = load_deployment(Path("deploy/local/demo.yaml"), {})
    assert deployment.frontend is not None
    deployment.frontend["http_host"] = host
    await main.run(deployment, log_format="text", demonstration=demonstration.SAMPLE)
    key = environs[0].get("DYN_TRTLLM_API_KEY", "")
    assert bool(key) == is_printed
    assert ("DYN_TRTLLM_API_KEY" in capsys.readouterr().out) == is_printed
    if is_printed:
        with pytest.raises(ConfigError, match="--allow-anonymous"):
            await main.run(deployment, log_format="text")  # only a demo makes a key


def test_summary_shows_address_models_and_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main.shutil, "which", lambda name: f"/usr/bin/{name}")
    data = {
        "workers": [
            {
                "name": name,
                "disaggregation_mode": name,
                "devices": devices,
                "flags": {"model": "m", "engine": "vllm"},
            }
            for name, devices in (("prefill", [0]), ("decode", "cpu"))
        ]
    }
    specs = processes(checked_deployment(data, "d"))
    assert main._summary(specs, "http://localhost:80") == [
        ("URL", "http://localhost:80/v1"),
        ("models", "m"),
        ("workers", "prefill (vllm, GPU 0)"),
        ("workers", "decode (vllm, CPU)"),
        ("chat", "dynamo-trtllm chat --url http://localhost:80"),
        ("curl", "curl http://localhost:80/v1/models"),
        ("logs", "dynamo-trtllm logs --follow"),
        ("API", "http://localhost:80/docs"),
    ]


@pytest.mark.parametrize(
    ("environment", "shown"),
    [("clone/.venv", ".venv/bin/activate"), ("my env", "'{}/my env/bin/activate'")],
)
def test_summary_of_an_inactive_environment_activates_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: str, shown: str
) -> None:
    (tmp_path / "clone").mkdir()
    monkeypatch.chdir(tmp_path / "clone")
    folder = tmp_path / environment
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "activate").touch()
    monkeypatch.setattr(main.sys, "prefix", str(folder))
    monkeypatch.setattr(main.shutil, "which", lambda _: None)
    workers = [{"name": "a", "disaggregation_mode": "prefill_and_decode", "flags": {"model": "m"}}]
    specs = processes(checked_deployment({"workers": workers}, "d"))
    rows = main._summary(specs, "http://localhost:80")
    names = [name for name, _ in rows]
    assert names.index("shell") < names.index("chat")
    assert dict(rows)["shell"].startswith(f"source {shown.format(tmp_path)} ")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    text = dict(main._summary(specs, "http://localhost:80"))["shell"]
    assert shlex.split(text, comments=True) == ["source", str(folder / "bin" / "activate")]


def test_summary_has_the_key_in_its_curl_command() -> None:
    workers = [{"name": "a", "disaggregation_mode": "prefill_and_decode", "flags": {"model": "m"}}]
    data = {"frontend": {"api-key": "sk-secret-of-the-test"}, "workers": workers}
    rows = dict(main._summary(processes(checked_deployment(data, "d")), "http://localhost:80"))
    header = '-H "Authorization: Bearer $DYN_TRTLLM_API_KEY"'
    assert rows["curl"] == f"curl http://localhost:80/v1/models {header}"
    assert "sk-secret" not in str(rows)


@pytest.mark.parametrize("once", [True, False])
async def test_run_stopped_before_serving_has_failed(monkeypatch, once):
    monkeypatch.setattr(main, "Launcher", Supervised)
    deployment = load_deployment(Path("deploy/local/demo.yaml"), {})
    await main.run(deployment, log_format="text", once=once)
    monkeypatch.setattr(Supervised, "serves", False)
    with pytest.raises(RunFailed, match="stopped before") if once else nullcontext():
        await main.run(deployment, log_format="text", once=once)


async def test_run_ineffective_variable_is_named_by_launcher_only(monkeypatch, caplog):
    given = []

    class Recording(Supervised):
        def __init__(self, *arguments: object) -> None:
            given.extend(arguments)

    monkeypatch.setattr(main, "Launcher", Recording)
    monkeypatch.setenv("DYN_MODEL_NAME", "/c")
    monkeypatch.setenv("DYN_KVBM_METRICS", "1")
    deployment = load_deployment(Path("deploy/local/demo.yaml"), {})
    await main.run(deployment, log_format="text")
    (line,) = [message for message in caplog.messages if "without effect" in message]
    assert "DYN_MODEL_NAME" in line
    assert "DYN_KVBM_METRICS" in line
    caplog.clear()
    monkeypatch.setattr(loading.os, "environ", given[-1])
    loading.warn_of_ignored_variables(FrontendConfig())
    assert caplog.messages == []
