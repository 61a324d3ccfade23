#!/usr/bin/env bash
# Launches gpt-oss-120b with vLLM as a prefill and a decode worker, like the Dynamo guides.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/start.bash"
about="Starts etcd and NATS (or uses running ones), a frontend, and gpt-oss-120b with vLLM: a decode worker on four GPUs and
a prefill worker on four others."
launch deploy/local/gpt-oss-120b-vllm-disagg.yaml "$@"
