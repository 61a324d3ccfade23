#!/usr/bin/env bash
# gpt-oss-120b with TensorRT-LLM, whole requests in one worker: the aggregated target of the guides.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/start.bash"
about="Starts etcd and NATS (or uses those that run), a frontend, and gpt-oss-120b with TensorRT-LLM: one worker for whole
requests on four GPUs."
launch deploy/local/gpt-oss-120b-agg.yaml "$@"
