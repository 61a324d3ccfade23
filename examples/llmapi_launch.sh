#!/usr/bin/env bash
# Runs one TensorRT-LLM worker on several nodes. Every rank of the MPI job runs trtllm-llmapi-launch, which runs the
# script on rank 0 and waits for work of the engine on the other ranks. Only one worker registers.
#
#   srun --mpi=pmix -N 2 --ntasks-per-node 8 examples/llmapi_launch.sh --model-path /models/gpt-oss-120b \
#       --disaggregation-mode decode --tensor-parallel-size 16 \
#       --etcd-endpoints http://HEAD:2379 --nats-server nats://HEAD:4222
#
# Before that, each rank sets the variables of the kernel profile and of --compile-cache: its libraries read them when
# they start. srun or mpirun must assign a GPU to each rank. To drain the worker, send a signal to rank 0 (srun: --signal
# or scancel).
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    echo "usage: examples/llmapi_launch.sh [flags of dynamo-trtllm worker]"
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    exit 0
fi
python=${PYTHON:-python3}
environment=$("$python" -m dynamo_trtllm --engine trtllm --print-environment "$@")
eval "$environment"
exec trtllm-llmapi-launch "$python" "$(dirname "$0")/embedded_trtllm.py" "$@"
