#!/usr/bin/env bash
# One TensorRT-LLM worker whose ranks are spread over several nodes, started by Open MPI from one of them.
set -euo pipefail

usage() {
    cat <<END
usage: HOSTFILE=hosts.txt RANKS=16 $0 [flags of python -m dynamo_trtllm]

Every rank runs trtllm-llmapi-launch. On rank 0 that starts the worker, which registers and serves; the others wait for
the engine's work. RANKS is the product of the parallel sizes. etcd and NATS must be reachable from rank 0, so
ETCD_ENDPOINTS and NATS_SERVER must not be loopback addresses. SIGTERM drains the worker.

  HOSTFILE      Open MPI's file of nodes, one a line: node1 slots=8
  RANKS         GPUs of this worker, all nodes together
  PYTHON        the same path on every node (default: python3)

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

# What mpirun does not carry to other nodes by itself.
exported=()
for name in ETCD_ENDPOINTS NATS_SERVER DYN_NAMESPACE HF_TOKEN TRTLLM_ENABLE_PDL TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL; do
    [[ -n ${!name:-} ]] && exported+=(-x "$name")
done
exec mpirun --hostfile "$HOSTFILE" -np "$RANKS" "${exported[@]}" \
    trtllm-llmapi-launch "${PYTHON:-python3}" -m dynamo_trtllm "$@"
