#!/usr/bin/env bash
# The guides' launch of gpt-oss-120b with vLLM: a prefill and a decode worker.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/start.bash"
about="Starts etcd and NATS (or uses those that run), a frontend, and gpt-oss-120b with vLLM: a decode worker on four GPUs and
a prefill worker on four others."
launch deploy/local/gpt-oss-120b-vllm-disagg.yaml "$@"
