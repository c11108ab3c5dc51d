#!/usr/bin/env bash
# Trains on the GPUs of one node or of several. On several: run the same command on each node.
#
#   launch/torchrun.sh [--dry-run] --config=configs/llama_1b.yaml [section.key=value ...]
#
# Edit these five lines, or set the variables (Kubeflow Trainer's PET_ variables count too). Several nodes need RDZV_ENDPOINT, HOST[:PORT] of one node that all of
# them reach, the same RDZV_ID everywhere, and checkpoints in a folder that they share.
nproc_per_node=${NPROC_PER_NODE:-gpu} # processes per node; gpu: one for each GPU
nnodes=${NNODES:-${PET_NNODES:-1}} # MIN:MAX: continues on the nodes that are left; others may join
rdzv_endpoint=${RDZV_ENDPOINT:-${PET_MASTER_ADDR:+$PET_MASTER_ADDR:${PET_MASTER_PORT:-29500}}}
rdzv_id=${RDZV_ID:-portable_fsdp}
max_restarts=${MAX_RESTARTS:-3} # how often all processes are started again, from the last checkpoint, after a failure

set -euo pipefail

dry_run=false
if [[ ${1:-} == --dry-run ]]; then
    dry_run=true
    shift
fi

if [[ $nnodes == 1 ]]; then
    meeting=(--standalone) # a free port of this host, so that two runs don't collide
elif [[ -n $rdzv_endpoint ]]; then
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # else a node that comes back is told no address: docs/failures.md
    meeting=(--nnodes="$nnodes" --rdzv-backend=c10d --rdzv-id="$rdzv_id" --rdzv-endpoint="$rdzv_endpoint")
    [[ $nnodes != *:* ]] || meeting+=(--rdzv-conf=last_call_timeout=10) # the wait for more than MIN nodes, instead of 30 s
else
    echo "torchrun.sh: NNODES=$nnodes needs RDZV_ENDPOINT=HOST[:PORT], one node that all nodes reach." >&2
    exit 2
fi

# A later --device of the caller's overrides this one.
arguments=(--device=cuda "$@")
devices=$nproc_per_node
if [[ $devices == gpu ]] && ! $dry_run; then
    devices=$(python -c 'import torch; print(torch.cuda.device_count())') # as torchrun counts them
fi
[[ $devices =~ ^[1-9][0-9]*$ ]] && counted=$devices || counted=auto # torchrun knows other words too
check=(python -m portable_fsdp.explain --strict --json --num_devices="$counted" --num_hosts="${nnodes%%:*}" "${arguments[@]}")
train=(torchrun "${meeting[@]}" --nproc-per-node="$nproc_per_node" --max-restarts="$max_restarts"
    -m portable_fsdp.launch "${arguments[@]}")
if $dry_run; then
    printf '%q ' "${check[@]}"
    echo '> /dev/null &&'
    printf '%q ' "${train[@]}"
    echo
    exit
fi
# torchrun makes 1 of every exit code: a mistake in the config, also one that only shows on these devices, is to end
# with 2 here, and isn't tried again.
"${check[@]}" > /dev/null
if [[ $devices == 0 ]]; then
    echo "torchrun.sh: NPROC_PER_NODE=gpu: expected a GPU, torch sees none here. See python -m portable_fsdp.doctor." >&2
    exit 2
fi
exec "${train[@]}"
