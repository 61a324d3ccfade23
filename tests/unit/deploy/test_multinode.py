"""deploy/container/multinode with programs in place of ssh, sshd and mpirun that tell how they were
called.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.unit.deploy.kustomize import documents
from tests.unit.deploy.recipes import MODEL, ROOT, pods

PROGRAM = ROOT / "deploy" / "container" / "multinode"
RECORD = '#!/bin/sh\nprintf "%s " "$(basename "$0")" >>"$RECORD"\nprintf "%s\\n" "$*" >>"$RECORD"\n'


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A group of three pods of eight GPUs, and a key as a Secret mounts it: readable by the
    group.
    """
    programs = tmp_path / "bin"
    keys = tmp_path / "keys"
    programs.mkdir()
    keys.mkdir()
    for name in ("ssh", "mpirun", "sshd"):
        (programs / name).write_text(RECORD)
        (programs / name).chmod(0o755)
    (programs / "python3").write_text(
        '#!/bin/sh\necho "$VARIABLES"; exit "${VARIABLES_STATUS:-0}"\n'
    )
    (programs / "python3").chmod(0o755)
    (programs / "ssh-keygen").write_text('#!/bin/sh\necho "ssh-ed25519 AAAA"\n')
    (programs / "ssh-keygen").chmod(0o755)
    (keys / "ssh-privatekey").write_text("key\n")
    (keys / "ssh-privatekey").chmod(0o440)
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "RECORD": str(tmp_path / "record"),
        "LWS_LEADER_ADDRESS": "decode-0.decode.ns",
        "LWS_GROUP_SIZE": "3",
        "GPUS_PER_NODE": "8",
        "MPI_SSH_KEYS": str(keys),
    }


def run(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *words], capture_output=True, text=True, check=False, env=environ
    )


def recorded(environ: dict[str, str]) -> list[list[str]]:
    return [shlex.split(line) for line in Path(environ["RECORD"]).read_text().splitlines()]


def test_hosts_when_asked_for_then_all_pods_of_the_group(environ: dict[str, str]) -> None:
    assert (
        run(environ, "hosts").stdout
        == "decode-0.decode.ns:8,decode-0-1.decode.ns:8,decode-0-2.decode.ns:8\n"
    )


def test_leader_starts_one_job_when_all_workers_answer(environ: dict[str, str]) -> None:
    given = {
        "NATS_SERVER": "nats://a:1",
        "OVERRIDE_QUANT_ALGO": "W4A8_MXFP4_MXFP8",
        "UNRELATED": "1",
    }
    given |= {"NCCL_P2P_LEVEL": "NVL", "VARIABLES": "export UCX_MEMTYPE_CACHE='a b'"}
    done = run(
        environ | given, "leader", "python3", "-m", "dynamo_trtllm", "--tensor-parallel-size=24"
    )
    assert done.returncode == 0, done.stderr
    *asked, job = recorded(environ)
    assert [words[0] for words in asked] == ["ssh", "ssh"]
    assert [words[-2:] for words in asked] == [
        ["decode-0-1.decode.ns", "true"],
        ["decode-0-2.decode.ns", "true"],
    ]
    assert job[:3] == ["mpirun", "-np", "24"]
    assert (
        job[job.index("--host") + 1]
        == "decode-0.decode.ns:8,decode-0-1.decode.ns:8,decode-0-2.decode.ns:8"
    )
    sent = {job[i + 1] for i, word in enumerate(job) if word == "-x"}
    assert {
        "NATS_SERVER",
        "OVERRIDE_QUANT_ALGO",
        "PATH",
        "HOME",
        "NCCL_P2P_LEVEL",
        "UCX_MEMTYPE_CACHE",
    } <= sent
    assert "UNRELATED" not in sent
    assert job[-5:] == [
        "trtllm-llmapi-launch",
        "python3",
        "-m",
        "dynamo_trtllm",
        "--tensor-parallel-size=24",
    ]
    key = Path(environ["HOME"]) / ".multinode" / "key"
    assert key.stat().st_mode & 0o777 == 0o600  # ssh refuses others


def test_leader_when_worker_is_rejected_then_starts_no_job(environ: dict[str, str]) -> None:
    done = run(environ | {"VARIABLES_STATUS": "2"}, "leader", "python3", "-m", "dynamo_trtllm")
    assert done.returncode == 2
    assert not Path(environ["RECORD"]).exists()


def test_worker_when_started_then_only_the_groups_key_may_come(environ: dict[str, str]) -> None:
    done = run(environ, "worker")
    assert done.returncode == 0, done.stderr
    ((program, *words),) = recorded(environ)
    assert program == "sshd"
    allowed = next(
        word.partition("=")[2] for word in words if word.startswith("AuthorizedKeysFile=")
    )
    assert Path(allowed).read_text() == "ssh-ed25519 AAAA\n"
    assert "PasswordAuthentication=no" in words


def test_leader_connects_to_hosts_with_the_groups_key_alone(environ: dict[str, str]) -> None:
    assert run(environ, "worker").returncode == 0
    assert run(environ, "leader", "python3", "-m", "dynamo_trtllm").returncode == 0
    served, *calls = recorded(environ)
    assert served[0] == "sshd"
    key = Path(served[served.index("-h") + 1])
    assert key.read_text() == "key\n"  # of the Secret
    for words in calls:
        line = " ".join(words)
        assert "StrictHostKeyChecking=yes -o HostKeyAlias=multinode" in line
        (known,) = re.findall(r"UserKnownHostsFile=(\S+)", line)
        assert Path(known).read_text() == "multinode ssh-ed25519 AAAA\n"


def test_drain_when_nothing_serves_then_it_returns(environ: dict[str, str]) -> None:
    """And the recipe calls verbs that there are."""
    assert run(environ, "idle").returncode == 0
    for pod in pods(documents(MODEL / "multinode/decode.yaml")):
        used = [pod.args[1], pod.container["lifecycle"]["preStop"]["exec"]["command"][1]]
        assert used in (["leader", "drain"], ["worker", "idle"])


@pytest.mark.parametrize("words", [[], ["lead"], ["leader"]])
def test_program_when_given_nonsense_then_says_so(
    environ: dict[str, str], words: list[str]
) -> None:
    done = run(environ, *words)
    assert done.returncode == 2
    assert done.stderr
