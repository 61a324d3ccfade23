#!/usr/bin/env bash
# The launch script of the guides for gpt-oss-120b with TensorRT-LLM: a prefill and a decode worker.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/start.bash"
about="Starts etcd and NATS (or uses those that run), a frontend, and gpt-oss-120b with TensorRT-LLM: a prefill worker on
four GPUs and a decode worker on four others."
launch deploy/local/gpt-oss-120b-disagg.yaml "$@"
