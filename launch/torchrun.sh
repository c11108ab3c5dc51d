#!/usr/bin/env bash
# Trains on the GPUs of one node or of several. On several: run the same command on each node.
#
#   launch/torchrun.sh [--dry-run] --config=configs/llama_1b.yaml [section.key=value ...]
#
# Edit these four lines, or set the variables. Several nodes need RDZV_ENDPOINT, HOST[:PORT] of one node that all of
# them reach, the same RDZV_ID everywhere, and a run.dir on a file system that they share.
nproc_per_node=${NPROC_PER_NODE:-gpu} # processes per node; gpu: one for each GPU
nnodes=${NNODES:-1}
rdzv_endpoint=${RDZV_ENDPOINT:-}
rdzv_id=${RDZV_ID:-portable_fsdp}

set -euo pipefail

dry_run=false
if [[ ${1:-} == --dry-run ]]; then
    dry_run=true
    shift
fi

if [[ $nnodes == 1 ]]; then
    meeting=(--standalone) # a free port of this host, so that two runs don't collide
elif [[ -n $rdzv_endpoint ]]; then
    meeting=(--nnodes="$nnodes" --rdzv-backend=c10d --rdzv-id="$rdzv_id" --rdzv-endpoint="$rdzv_endpoint")
else
    echo "torchrun.sh: NNODES=$nnodes needs RDZV_ENDPOINT=HOST[:PORT], one node that all nodes reach." >&2
    exit 2
fi

# A later --device of the caller's overrides this one.
command=(torchrun "${meeting[@]}" --nproc-per-node="$nproc_per_node" -m portable_fsdp.launch --device=cuda "$@")
if $dry_run; then
    printf '%q ' "${command[@]}"
    echo
    exit
fi
exec "${command[@]}"
