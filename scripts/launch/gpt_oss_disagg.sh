#!/usr/bin/env bash
# Launches gpt-oss-120b with TensorRT-LLM as a prefill and a decode worker, like the script of the Dynamo guides.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/start.bash"
about="Starts etcd and NATS (or uses running ones), a frontend, and gpt-oss-120b with TensorRT-LLM: a prefill worker on
four GPUs and a decode worker on four others."
launch deploy/local/gpt-oss-120b-disagg.yaml "$@"
