"""Compile etcd.proto to etcd.binpb, in dynamo_trtllm/cluster/discovery.

`python -m scripts.etcd_api` runs it. A test compares the compiled file with this output.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "dynamo_trtllm" / "cluster" / "discovery"
COMPILED = FOLDER / "etcd.binpb"


def compiled() -> bytes:
    """Return etcd.proto as a serialized FileDescriptorSet."""
    with tempfile.NamedTemporaryFile() as output:
        protoc = [sys.executable, "-m", "grpc_tools.protoc"]
        files = [f"--proto_path={FOLDER}", f"--descriptor_set_out={output.name}", "etcd.proto"]
        subprocess.run([*protoc, *files], check=True)
        return Path(output.name).read_bytes()


if __name__ == "__main__":
    COMPILED.write_bytes(compiled())
