#!/usr/bin/env bash
# One TensorRT-LLM worker over several nodes: every rank of the MPI job runs this file's last line. On rank 0
# trtllm-llmapi-launch runs the script; on the others it waits for the engine's work, so only one worker registers.
#
#   srun --mpi=pmix -N 2 --ntasks-per-node 8 examples/llmapi_launch.sh --model-path /models/gpt-oss-120b \
#       --disaggregation-mode decode --tensor-parallel-size 16 \
#       --etcd-endpoints http://HEAD:2379 --nats-server nats://HEAD:4222
#
# srun or mpirun must give each rank its GPU, and a signal must reach rank 0 for a drain (srun: --signal or scancel).
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    echo "usage: examples/llmapi_launch.sh [flags of python -m dynamo_trtllm]"
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    exit 0
fi
exec trtllm-llmapi-launch "${PYTHON:-python3}" "$(dirname "$0")/embedded_trtllm.py" "$@"
