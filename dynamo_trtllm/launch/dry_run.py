"""Say what `launch` would start (`dynamo-trtllm launch FILE --dry-run`)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from dynamo_trtllm.config.deployment import START, DeploymentConfig
from dynamo_trtllm.engines.gpu import VISIBLE
from dynamo_trtllm.launch.process_specs import ProcessSpec
from dynamo_trtllm.protocol.sanitize import escape_controls, mask_address


def describe_start(deployment: DeploymentConfig, specs: Sequence[ProcessSpec]) -> str:
    """Return the servers and processes of a deployment as text, in the order of their start.

    Of variables other than CUDA_VISIBLE_DEVICES, only the names are shown: values may be secrets.

    Args:
        deployment: the deployment.
        specs: its processes.
    """
    services = {"etcd": deployment.services.etcd, "nats": deployment.services.nats}
    lines = [f"namespace {deployment.namespace}"]
    for name, address in services.items():
        what = "would be started" if address == START else f"is used at {mask_address(address)}"
        lines.append(f"{name} {what}")
    for spec in specs:
        lines += _process(spec)
    return "".join(f"{escape_controls(line)}\n" for line in lines)


def _process(spec: ProcessSpec) -> Iterator[str]:
    yield f"{spec.name} would be started"
    port = f"port {spec.port}" if spec.port else "a free port"
    yield f"  address: {spec.host}, {port} ({spec.port_flag})"
    if VISIBLE in spec.env:
        yield f"  GPUs: {spec.env[VISIBLE] or 'none'} ({VISIBLE})"
    names = [name for name in spec.env if name != VISIBLE]
    if names:
        yield f"  variables: {', '.join(names)}"
    yield f"  command: python -m {spec.module} {shlex.join(spec.argv)}"
