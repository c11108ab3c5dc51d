#!/usr/bin/env bash
# TPUs through the queue, which is how they are to be had: one slice, or several that train together. `run` asks for
# them, waits, installs this checkout, trains, and asks again where they were taken away; a finished run deletes them.
#
#   launch/tpu_queued_resource.sh [--dry-run] run --config=configs/llama_1b.yaml checkpoint.dir=gs://BUCKET/RUN [...]
#       [--env=HF_TOKEN,WANDB_API_KEY] [-- --network=mine --internal-ips --internal-ip ...]
#   launch/tpu_queued_resource.sh [--dry-run] create | setup | logs | stop | delete | doctor [-- FLAGS OF gcloud]
#
# --env hands variables of your shell to the run, by their names. `run` first checks the config here; what follows `--`
# goes to those commands of gcloud that know it: to create, or to ssh and scp.

set +x # also under `bash -x`: no trace of the variables that --env hands over
environment=$(export -p)

# Edit these lines, or set the variables. Needs gcloud, signed in, and tpu_workers.sh beside this file. The disks go
# with the TPUs: let checkpoint.dir be a bucket. `run` ends with the exit code of the run: 0 finished, 2 a mistake in the
# config, 143 stopped by `stop`; anything else is tried again, TPU_TRIES times. After all but 0 the TPUs stay (and cost)
# until `delete`.
name=${TPU_NAME:-} # of the request; its TPUs are NAME-node, or NAME-node-0, NAME-node-1, ...
zone=${TPU_ZONE:-}
project=${TPU_PROJECT:-} # empty: gcloud's own default
# TPU_TYPE, as v6e-8: of each slice. TPU_VERSION: its image, if not the usual one for the type.
slices=${TPU_SLICES:-1}
capacity=${TPU_CAPACITY:-spot} # spot, reserved, or on-demand
valid_until=${TPU_VALID_UNTIL:-6h} # how long the request may wait; then it has failed, and is made again
tries=${TPU_TRIES:-20}
poll_s=${TPU_POLL_S:-30}
first_node=$name-node
if [[ $slices != 1 ]]; then first_node=$name-node-0; fi
export first_node capacity_variable=TPU_CAPACITY

set -euo pipefail
# shellcheck source=launch/tpu_workers.sh
source "$(dirname "${BASH_SOURCE[0]}")/tpu_workers.sh"

usage() {
    echo "usage: TPU_NAME=... TPU_ZONE=... TPU_TYPE=... launch/tpu_queued_resource.sh [--dry-run]" \
        "run ARGUMENTS OF portable_fsdp.launch [--env=NAME,...] | create | setup | logs | stop | delete | doctor" \
        "[-- FLAGS OF gcloud]" >&2
    exit 2
}

where=(--zone="$zone")
[[ -z $project ]] || where+=(--project="$project")
export usable=ACTIVE

create() {
    local nodes=(--node-id="$name-node") options=()
    if [[ $slices != 1 ]]; then nodes=(--node-count="$slices" --node-prefix="$name-node"); fi
    if [[ $capacity != on-demand ]]; then options=(--"$capacity"); fi
    call gcloud compute tpus queued-resources create "$name" "${where[@]}" "${nodes[@]}" \
        --accelerator-type="$TPU_TYPE" --runtime-version="${TPU_VERSION:-$(runtime_version "$TPU_TYPE")}" \
        --valid-until-duration="$valid_until" "${options[@]}" "${create_flags[@]}"
}

delete() {
    call gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
}

state() {
    ask gcloud compute tpus queued-resources describe "$name" "${where[@]}" --format='value(state.state)'
}

on_workers() {
    call gcloud compute tpus queued-resources ssh "$name" "${where[@]}" --node="$1" --worker="$2" --command="$3" \
        "${connect_flags[@]}" "${ssh_flags[@]}"
}

to_workers() {
    call gcloud compute tpus queued-resources scp "$1" "$name:$2" "${where[@]}" --node=all --worker=all \
        "${connect_flags[@]}" "${scp_flags[@]}"
}

main "$@"
if [[ $1 == run || "$1 ${2:-}" == "--dry-run run" ]]; then delete; fi
