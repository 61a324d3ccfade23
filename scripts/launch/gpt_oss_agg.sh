#!/usr/bin/env bash
# Launches gpt-oss-120b with TensorRT-LLM as one aggregated worker, the aggregated target of the Dynamo guides.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/start.bash"
about="Starts etcd and NATS (or uses running ones), a frontend, and gpt-oss-120b with TensorRT-LLM: one aggregated worker on
four GPUs."
launch deploy/local/gpt-oss-120b-agg.yaml "$@"
