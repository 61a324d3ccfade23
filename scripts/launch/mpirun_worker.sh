#!/usr/bin/env bash
# Starts one TensorRT-LLM worker on several nodes with Open MPI, from one of the nodes.
set -euo pipefail

usage() {
    cat <<END
usage: HOSTFILE=hosts.txt RANKS=16 $0 [flags of dynamo-trtllm worker]

Every rank runs trtllm-llmapi-launch. Rank 0 starts the worker; the other ranks wait for work of the engine. RANKS is the
product of the parallel sizes. Rank 0 must reach etcd and NATS, so ETCD_ENDPOINTS and NATS_SERVER must not be loopback
addresses. SIGTERM drains the worker.

  HOSTFILE      Open MPI's list of nodes, one per line: node1 slots=8
  RANKS         number of GPUs of this worker on all nodes
  PYTHON        Python interpreter, with the same path on every node (default: python3)

  HOSTFILE=prefill.txt RANKS=8 $0 --model-path /model --served-model-name openai/gpt-oss-120b \\
      --disaggregation-mode prefill --extra-engine-args engine_configs/gpt-oss-120b/prefill.yaml \\
      --tensor-parallel-size 8 --expert-parallel-size 8
END
}

[[ ${1:-} == -h || ${1:-} == --help ]] && { usage; exit 0; }
if [[ -z ${HOSTFILE:-} || -z ${RANKS:-} ]]; then
    echo "$0: set HOSTFILE and RANKS; see --help" >&2
    exit 2
fi

# mpirun does not export these to other nodes by itself.
exported=()
for name in ETCD_ENDPOINTS NATS_SERVER DYN_NAMESPACE HF_TOKEN TRTLLM_ENABLE_PDL TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL; do
    [[ -n ${!name:-} ]] && exported+=(-x "$name")
done
exec mpirun --hostfile "$HOSTFILE" -np "$RANKS" "${exported[@]}" \
    trtllm-llmapi-launch "${PYTHON:-python3}" -m dynamo_trtllm "$@"
