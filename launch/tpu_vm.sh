#!/usr/bin/env bash
# Installs portable_fsdp on all workers of a TPU VM that exists already, and trains on them.
#
#   launch/tpu_vm.sh [--dry-run] setup
#   launch/tpu_vm.sh [--dry-run] run --config=configs/llama_1b.yaml [section.key=value ...]
#
# Edit these three lines, or set the variables. Needs gcloud, signed in. `setup` copies this checkout, as it is on
# disk, to ~/portable_fsdp on every worker. On several workers run.dir must lie on a file system that they share.
name=${TPU_NAME:-}
zone=${TPU_ZONE:-}
project=${TPU_PROJECT:-} # empty: gcloud's own default

set -euo pipefail

usage() {
    echo "usage: TPU_NAME=... TPU_ZONE=... launch/tpu_vm.sh [--dry-run] setup | run ARGUMENTS OF portable_fsdp.launch" >&2
    exit 2
}

dry_run=false
if [[ ${1:-} == --dry-run ]]; then
    dry_run=true
    shift
fi
[[ -n $name && -n $zone && $# -gt 0 ]] || usage
action=$1
shift

where=(--zone="$zone" --worker=all)
[[ -z $project ]] || where+=(--project="$project")

call() {
    if $dry_run; then
        printf '%q ' "$@"
        echo
    else
        "$@"
    fi
}

on_all_workers() { # one argument: a command line for the workers' bash
    call gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --command="$1"
}

setup() {
    local root archive
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    archive=$root/build/portable_fsdp.tar.gz
    call mkdir -p "$root/build"
    call tar --create --gzip --file="$archive" --directory="$root" \
        --exclude=./.git --exclude='./.venv*' --exclude=./build --exclude=./runs .
    call gcloud compute tpus tpu-vm scp "$archive" "$name:portable_fsdp.tar.gz" "${where[@]}"
    # The images of TPU VMs bring an older Python. apt waits for the upgrades that a new VM runs by itself.
    on_all_workers "set -e
sudo apt-get -o DPkg::Lock::Timeout=600 update
sudo apt-get -o DPkg::Lock::Timeout=600 install -y python3.11-venv
mkdir -p portable_fsdp
tar --extract --gzip --file=portable_fsdp.tar.gz --directory=portable_fsdp
cd portable_fsdp
python3.11 -m venv .venv
.venv/bin/python -m pip install --editable '.[tpu]'"
}

run() {
    # The arguments become part of a command line that another shell reads: each is quoted for it.
    local arguments
    arguments=$(printf ' %q' "$@")
    on_all_workers "cd portable_fsdp && PJRT_DEVICE=TPU .venv/bin/python -m portable_fsdp.launch --device=tpu$arguments"
}

case $action:$# in
setup:0) setup ;;
run:0) usage ;;
run:*) run "$@" ;;
*) usage ;;
esac
