"""The Slurm and mpirun scripts with stand-ins for the programs they start: which command lines,
what a signal does.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.protocol.messages import Role

FOLDER = Path(__file__).parents[2] / "scripts/launch"
# Writes its own line and lives until SIGTERM, as a server does; `python3` plays the frontend. It
# takes a moment to end and writes a line for each SIGTERM, because a worker takes a second one as
# the order not to drain.
STAND_IN = """\
#!/usr/bin/env bash
me=$(basename "$0")
trap 'echo "$me ended" >>"$LOG"; kill $!; sleep 0.3; exit 143' TERM
printf '%s %s pid=%s\\n' "$me" "${*@Q}" $$ >>"$LOG"
sleep 60 &
wait $!
"""
# Prints variables for the ranks, as a worker does, or plays a server.
PYTHON = STAND_IN.replace(
    "\n",
    '\nif [[ "$*" == *" --print-environment" ]]; then echo "$VARIABLES"; exit'
    ' "${VARIABLES_STATUS:-0}"; fi\n',
    1,
)
RANKS = STAND_IN.replace("\n", '\necho "UCX_MEMTYPE_CACHE=$UCX_MEMTYPE_CACHE" >>"$RANKS_LOG"\n', 1)
ECHO = '#!/usr/bin/env bash\nprintf "%s\\n" "$(basename "$0")" "$@" >>"$LOG"\n'


class Job:
    def __init__(self, folder: Path) -> None:
        self._bin = folder / "bin"
        self._bin.mkdir()
        self._log = folder / "log"
        self._log.touch()
        self.env = {
            "PATH": f"{self._bin}:{os.environ['PATH']}",
            "LOG": str(self._log),
            "TMPDIR": str(folder),
            "RESTART_AFTER_S": "0",
            "VARIABLES": "export UCX_MEMTYPE_CACHE='a b'",
            "RANKS_LOG": str(folder / "ranks"),
        }

    def plays(self, *names: str, script: str = STAND_IN) -> None:
        for name in names:
            (self._bin / name).write_text(script)
            (self._bin / name).chmod(0o755)

    def lines(self) -> list[str]:
        return self._log.read_text().splitlines()

    def started(self, name: str) -> list[list[str]]:
        return [
            shlex.split(line)[1:]
            for line in self.lines()
            if line.startswith(f"{name} ") and " pid=" in line
        ]

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 50
        while not condition():
            assert time.monotonic() < deadline, self.lines()
            time.sleep(0.02)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.fixture
def slurm(job: Job, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    job.plays("etcd", "nats-server")
    job.plays("srun", script=RANKS)
    job.plays("python3", script=PYTHON)
    env = job.env | {"SLURM_JOB_NUM_NODES": "3", "DECODE_NODES": "2", "MODEL_PATH": "/models/a b"}
    process = subprocess.Popen(
        [FOLDER / "slurm_gpt_oss_disagg.sbatch"], env=env, cwd=tmp_path, start_new_session=True
    )
    yield process
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def worker_of(words: list[str]) -> WorkerConfig:
    start = words.index("dynamo_trtllm")
    assert words[start - 3 : start] == ["trtllm-llmapi-launch", "python3", "-m"]
    flags = [word for word in words[start + 1 :] if not word.startswith("pid=")]
    return load(WorkerConfig, prog="p", argv=flags, environ={})


@pytest.mark.parametrize("path", sorted(FOLDER.glob("gpt_oss_*.sh")), ids=lambda path: path.stem)
def test_launch_script_searches_only_its_checkout_for_modules(path: Path, tmp_path: Path) -> None:
    def words(folder: Path) -> list[str]:
        environ = os.environ | {"PYTHON": "echo"}
        command = [str(path), "--port", "1"]
        return subprocess.check_output(command, cwd=folder, env=environ, text=True).split()

    launcher = ["-m", "dynamo_trtllm.launch", "--port", "1"]
    assert words(tmp_path)[:-1] == ["-P", *launcher]
    assert words(FOLDER.parents[1])[:-1] == launcher


def test_slurm_gives_each_worker_its_nodes(job: Job, slurm: subprocess.Popen[bytes]) -> None:
    job.until(lambda: len(job.started("srun")) == 2 and len(job.lines()) == 5)
    by_role = {
        config.disaggregation_mode: (words, config)
        for words in job.started("srun")
        if (config := worker_of(words))
    }
    for role, first, nodes, tokens, batch in (
        (Role.PREFILL, 0, 1, 20000, 32),
        (Role.DECODE, 1, 2, 16384, 128),
    ):
        words, config = by_role[role]
        assert {f"--relative={first}", f"--nodes={nodes}", f"--ntasks={4 * nodes}"} <= set(words)
        assert (config.tensor_parallel_size, config.expert_parallel_size) == (4 * nodes, 4 * nodes)
        assert (config.max_num_tokens, config.max_batch_size, config.model_path) == (
            tokens,
            batch,
            "/models/a b",
        )
    (frontend,) = job.started("python3")
    assert frontend[:2] == ["-m", "dynamo_trtllm.frontend"]
    assert load(FrontendConfig, prog="p", argv=frontend[2:-1], environ={}).http_port == 8000
    assert Path(job.env["RANKS_LOG"]).read_text() == "UCX_MEMTYPE_CACHE=a b\n" * 2


def test_slurm_restarts_only_a_dead_worker(
    job: Job, slurm: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    job.until(lambda: len(job.lines()) == 5)
    (key_file,) = tmp_path.glob("api-key-*")
    assert key_file.stat().st_mode & 0o777 == 0o600
    os.kill(int(job.started("srun")[0][-1].removeprefix("pid=")), signal.SIGKILL)
    job.until(lambda: len(job.started("srun")) == 3)
    assert len(job.lines()) == 6
    slurm.send_signal(signal.SIGTERM)
    assert slurm.wait(15) == 0
    assert sum(line.endswith(" ended") for line in job.lines()) == 5
    # The file with the API key is gone, too.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "log", "ranks"]


@pytest.mark.parametrize("status", [0, 2])
def test_slurm_rejected_worker_ends_all(job: Job, tmp_path: Path, status: int) -> None:
    """By its process on rank 0, or already when it is asked for the variables of its ranks."""
    job.plays("etcd", "nats-server")
    job.plays("python3", script=PYTHON)
    job.plays("srun", script="#!/usr/bin/env bash\nexit 2\n")
    env = job.env | {"SLURM_JOB_NUM_NODES": "2", "VARIABLES_STATUS": str(status)}
    done = subprocess.run(
        [FOLDER / "slurm_gpt_oss_disagg.sbatch"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 2
    assert "has a configuration error, see its last line" in done.stderr


def test_slurm_with_too_few_nodes_exits_with_2(job: Job) -> None:
    env = job.env | {"SLURM_JOB_NUM_NODES": "2", "DECODE_NODES": "2"}
    done = subprocess.run(
        [FOLDER / "slurm_gpt_oss_disagg.sbatch"], env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (2, "slurm: 1 + 2 nodes are needed, the job has 2\n")


def test_mpirun_starts_the_launcher_on_every_rank(job: Job) -> None:
    job.plays("mpirun", script=ECHO)
    job.plays("python3", script=PYTHON)
    env = job.env | {"HOSTFILE": "hosts", "RANKS": "8", "NATS_SERVER": "nats://h:4222"}
    flags = [
        "--model-path",
        "/model",
        "--disaggregation-mode",
        "decode",
        "--tensor-parallel-size",
        "8",
    ]
    subprocess.run([FOLDER / "mpirun_worker.sh", *flags], env=env, check=True)
    exported = ["-x", "NATS_SERVER", "-x", "UCX_MEMTYPE_CACHE"]
    start = [
        "mpirun",
        "--hostfile",
        "hosts",
        "-np",
        "8",
        *exported,
        "trtllm-llmapi-launch",
        "python3",
    ]
    assert job.lines() == [*start, "-m", "dynamo_trtllm", *flags]


def test_mpirun_passes_variables_to_the_ranks(job: Job) -> None:
    job.plays("mpirun", script=ECHO)
    job.plays("python3", script=PYTHON)
    ours = [
        "DYN_NAMESPACE",
        "ETCD_ENDPOINTS",
        "HF_HUB_OFFLINE",
        "NATS_SERVER",
        "NCCL_P2P_LEVEL",
        "NIXL_LOG_LEVEL",
    ]
    ours += ["OVERRIDE_QUANT_ALGO", "TLLM_LOG_LEVEL", "TRTLLM_ENABLE_PDL", "TRT_LLM_X", "UCX_TLS"]
    others = ["OMPI_MCA_coll_ucc_enable", "OMPI_COMM_WORLD_RANK", "SLURM_JOB_ID", "MY_NCCL_X"]
    env = job.env | {"HOSTFILE": "hosts", "RANKS": "8", **dict.fromkeys([*ours, *others], "1")}
    subprocess.run([FOLDER / "mpirun_worker.sh", "--model-path", "/m"], env=env, check=True)
    words = job.lines()
    sent = [words[at + 1] for at, word in enumerate(words) if word == "-x"]
    assert sorted(sent) == sorted([*ours, "UCX_MEMTYPE_CACHE"])


def test_mpirun_with_rejected_worker_starts_nothing(job: Job) -> None:
    job.plays("mpirun", script=ECHO)
    job.plays("python3", script=PYTHON)
    env = job.env | {"HOSTFILE": "hosts", "RANKS": "8", "VARIABLES_STATUS": "2"}
    done = subprocess.run([FOLDER / "mpirun_worker.sh", "--model-path", "/m"], env=env, check=False)
    assert (done.returncode, job.lines()) == (2, [])


def test_scripts_export_the_same_prefixes() -> None:
    scripts = (
        FOLDER / "mpirun_worker.sh",
        FOLDER.parents[1] / "deploy" / "container" / "multinode",
    )
    lists = [
        [line for line in script.read_text().splitlines() if line.startswith("prefixes=")]
        for script in scripts
    ]
    assert lists[0] == lists[1]
    assert len(lists[0]) == 1


def test_mpirun_without_hosts_exits_with_2(job: Job) -> None:
    done = subprocess.run(
        [FOLDER / "mpirun_worker.sh"], env=job.env, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "set HOSTFILE and RANKS" in done.stderr
