"""What `--print-config` and `--dump-config-to` tell of each engine's arguments."""

from pathlib import Path

import pytest

from dynamo_trtllm.config.layers import read_yaml
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.external.library import LibraryPackage
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.worker import main as worker_main
from dynamo_trtllm.worker.show_arguments import argument_table, dump_arguments


def worker(*argv: str, env: dict[str, str] | None = None) -> WorkerConfig:
    return load(WorkerConfig, prog="w", argv=["--model", "m", *argv], environ=env or {})


def rows(text: str) -> dict[str, str]:
    """argument -> the rest of its line."""
    lines = [line.split(maxsplit=1) for line in text.splitlines()]
    return {line[0]: line[1] for line in lines if len(line) == 2}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "e.yaml"
    path.write_text("max_batch_size: 8\n")
    return path


@pytest.mark.parametrize("engine", ["torch", "mock"])
def test_table_of_our_engine_shows_sources(engine: str, file: Path) -> None:
    env = {"DYN_TRTLLM_MAX_SEQ_LEN": "77"}
    config = worker(
        "--engine", engine, "--extra-engine-args", str(file), "--kv-block-size", "16", env=env
    )
    found = rows(argument_table(config))
    assert found["max_batch_size"].split(maxsplit=1) == ["8", f"YAML {file}"]
    assert found["max_seq_len"].split(maxsplit=1) == ["77", "environment DYN_TRTLLM_MAX_SEQ_LEN"]
    assert found["kv_block_size"].split(maxsplit=1) == ["16", "flag --kv-block-size"]
    assert found["max_queue"].endswith(f"default ({engine})")


def test_table_when_a_flag_beats_the_file_then_a_note_says_so(file: Path) -> None:
    text = argument_table(
        worker("--engine", "mock", "--extra-engine-args", str(file), "--max-batch-size", "9")
    )
    assert f"note: --max-batch-size 9 overrides max_batch_size 8 of YAML {file}\n" in text


def test_table_of_built_config_names_the_configuration() -> None:
    found = rows(argument_table(WorkerConfig(model_path="m", engine="mock", max_batch_size=3)))
    assert found["max_batch_size"].split() == ["3", "configuration"]


@pytest.mark.parametrize("engine", [(), ("--engine", "trtllm")])
def test_table_without_tensorrt_llm_uses_newest_known_release(
    engine: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LibraryPackage, "is_installed", lambda _: False)
    text = argument_table(
        worker(*engine, "--kernels-profile", "hopper", "--tensor-parallel-size", "4")
    )
    title = text.splitlines()[1]
    assert "TensorRT-LLM 1.4.0rc4, kernels profile hopper" in title
    assert "TensorRT-LLM is not installed" in title
    found = rows(text)
    assert found["tensor_parallel_size"].split(maxsplit=1) == ["4", "flag --tensor-parallel-size"]
    assert found["moe_config.backend"].split(maxsplit=1) == [
        "AUTO",
        "default (TensorRT-LLM 1.4.0rc4)",
    ]
    part = "default (TensorRT-LLM 1.4.0rc4, read in part)"
    assert found["enable_chunked_prefill"].split(maxsplit=1) == ["false", part]
    # its default is unknown
    assert found["kv_cache_config.mixed_precision_first_n"].startswith("not read ")


def test_table_when_tensorrt_llm_is_installed_then_its_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LibraryPackage, "is_installed", lambda _: True)
    monkeypatch.setattr(LibraryPackage, "version", lambda _: "1.1.0")
    text = argument_table(worker("--engine", "trtllm", "--kernels-profile", "fallback"))
    assert text.splitlines()[1] == "arguments of TensorRT-LLM 1.1.0, kernels profile fallback"
    assert rows(text)["sampler_type"].split(maxsplit=1) == ["auto", "default (TensorRT-LLM 1.1.0)"]
    assert "num_serve_frontends" not in rows(text)  # of 1.3


def test_dump_when_read_back_then_what_was_set_and_nothing_else(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.yaml"
    dump_arguments(
        worker("--engine", "mock", "--extra-engine-args", str(file), "--kv-block-size", "16"), out
    )
    assert read_yaml(out) == {"max_batch_size": 8, "kv_block_size": 16}
    assert f"max_batch_size: 8  # YAML {file}\n" in out.read_text()


def test_dump_to_unwritable_file_names_its_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--dump-config-to .*: No such file or directory"):
        dump_arguments(worker("--engine", "mock"), tmp_path / "missing" / "out.yaml")


@pytest.mark.parametrize(
    ("is_on", "said"), [(True, "costs time in each step"), (False, "reports no KV blocks")]
)
def test_trtllm_table_notes_the_cost_of_statistics(is_on: bool, said: str) -> None:
    override = f'{{"enable_iter_perf_stats": {str(is_on).lower()}}}'
    text = argument_table(
        worker(
            "--engine",
            "trtllm",
            "--kernels-profile",
            "fallback",
            f"--override-engine-args={override}",
        )
    )
    (note,) = [
        line for line in text.splitlines() if line.startswith("note: enable_iter_perf_stats")
    ]
    assert said in note


def test_main_dumps_and_continues_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[WorkerConfig] = []

    class Started:
        def __init__(self, config: WorkerConfig) -> None:
            started.append(config)

        def run(self) -> None:
            pass

    out = tmp_path / "out.yaml"
    monkeypatch.setattr(worker_main, "Worker", Started)
    monkeypatch.setattr(
        "sys.argv",
        ["w", "--model", "m", "--engine=mock", "--max-batch-size=2", f"--dump-config-to={out}"],
    )
    with pytest.raises(SystemExit):
        worker_main.main()
    assert read_yaml(out) == {"max_batch_size": 2}
    assert [config.model_path for config in started] == ["m"]


def test_main_prints_config_without_a_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["w", "--model", "m", "--engine", "mock", "--print-config"])
    with pytest.raises(SystemExit) as stop:
        worker_main.main()
    assert stop.value.code == 0
    found = rows(capsys.readouterr().out)
    assert found["model_path"].split() == ["m", "flag", "--model"]
    assert found["step_s"].split() == ["0.005", "default", "(mock)"]
