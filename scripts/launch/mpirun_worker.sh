#!/usr/bin/env bash
# Starts one TensorRT-LLM worker on several nodes with Open MPI, from one of the nodes.
set -euo pipefail

# Variables of these names are for the engine, its libraries, or our own processes. mpirun exports OMPI_* by itself.
prefixes='TRTLLM_|TRT_LLM_|TLLM_|UCX_|NCCL_|NIXL_|OVERRIDE_QUANT_ALGO|DYN_|ETCD_|NATS_|HF_|TRITON_|FLASHINFER_'

usage() {
    cat <<END
usage: HOSTFILE=hosts.txt RANKS=16 $0 [flags of dynamo-trtllm worker]

Every rank runs trtllm-llmapi-launch. Rank 0 starts the worker; the other ranks wait for work of the engine. RANKS is the
product of the parallel sizes. Rank 0 must reach etcd and NATS, so ETCD_ENDPOINTS and NATS_SERVER must not be loopback
addresses. SIGTERM drains the worker. All ranks get the variables of the kernel profile for the GPUs of this host and of
--compile-cache (--print-environment shows them), and those of this shell whose names begin with
${prefixes//|/, }.

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

command=("${PYTHON:-python3}" -m dynamo_trtllm "$@")
# Ranks read these variables when they start, which is before our process runs on rank 0.
environment=$("${command[@]}" --print-environment)
eval "$environment"

# mpirun does not export these to other nodes by itself.
exported=()
for name in $(compgen -e | grep -E "^($prefixes)" || true); do
    exported+=(-x "$name")
done
exec mpirun --hostfile "$HOSTFILE" -np "$RANKS" "${exported[@]}" trtllm-llmapi-launch "${command[@]}"
