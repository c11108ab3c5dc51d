#!/usr/bin/env bash
# A TPU VM from your desk: creates it, installs this checkout on all its workers, trains, and goes on by itself where
# the TPU was taken away: `run` deletes what is left of it, creates it again, and starts the same run.
#
#   launch/tpu_vm.sh [--dry-run] create | setup | logs | stop | delete | doctor [-- FLAGS OF gcloud]
#   launch/tpu_vm.sh [--dry-run] run --config=configs/llama_1b.yaml checkpoint.dir=gs://BUCKET/RUN [section.key=value ...]
#       [--env=HF_TOKEN,WANDB_API_KEY] [-- --network=mine --internal-ips --internal-ip ...]
#
# --env hands variables of your shell to the run, by their names. `run` first checks the config here; what follows `--`
# goes to those commands of gcloud that know it: to create, or to ssh and scp.

set +x # also under `bash -x`: no trace of the variables that --env hands over
environment=$(export -p)

# Edit these lines, or set the variables. Needs gcloud, signed in, and tpu_workers.sh beside this file. The disks go
# with the TPU: let checkpoint.dir be a bucket. `run` ends with the exit code of the run: 0 finished, 2 a mistake in the
# config, 143 stopped by `stop`; anything else is tried again, TPU_TRIES times. The TPU stays until `delete`.
name=${TPU_NAME:-}
zone=${TPU_ZONE:-}
project=${TPU_PROJECT:-} # empty: gcloud's own default
# TPU_TYPE, as v6e-8: needed to create one. TPU_VERSION: its image, if not the usual one for the type.
spot=${TPU_SPOT:-true} # true, or false: on demand
tries=${TPU_TRIES:-20}
poll_s=${TPU_POLL_S:-30}
export slices=1 first_node=$name capacity_variable=TPU_SPOT

set -euo pipefail
# shellcheck source=launch/tpu_workers.sh
source "$(dirname "${BASH_SOURCE[0]}")/tpu_workers.sh"

usage() {
    echo "usage: TPU_NAME=... TPU_ZONE=... [TPU_TYPE=...] launch/tpu_vm.sh [--dry-run]" \
        "create | setup | run ARGUMENTS OF portable_fsdp.launch [--env=NAME,...] | logs | stop | delete | doctor" \
        "[-- FLAGS OF gcloud]" >&2
    exit 2
}

if [[ $spot != true && $spot != false ]]; then
    echo "tpu_vm.sh: TPU_SPOT=$spot: expected true or false." >&2
    exit 2
fi
where=(--zone="$zone")
[[ -z $project ]] || where+=(--project="$project")
export usable=READY

create() {
    local options=()
    [[ $spot == false ]] || options+=(--spot)
    call gcloud compute tpus tpu-vm create "$name" "${where[@]}" --accelerator-type="$TPU_TYPE" \
        --version="${TPU_VERSION:-$(runtime_version "$TPU_TYPE")}" "${options[@]}" "${create_flags[@]}"
}

delete() {
    call gcloud compute tpus tpu-vm delete "$name" "${where[@]}" --quiet
}

state() {
    ask gcloud compute tpus tpu-vm describe "$name" "${where[@]}" --format='value(state)'
}

on_workers() { # there is one node
    call gcloud "${track[@]}" compute tpus tpu-vm ssh "$name" "${where[@]}" --worker="$2" --command="$3" \
        "${connect_flags[@]}" "${ssh_flags[@]}"
}

to_workers() {
    call gcloud "${track[@]}" compute tpus tpu-vm scp "$1" "$name:$2" "${where[@]}" --worker=all \
        "${connect_flags[@]}" "${scp_flags[@]}"
}

main "$@"
