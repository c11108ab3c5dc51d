# What tpu_vm.sh and tpu_queued_resource.sh do alike: they source this file. Nothing to edit here.
# shellcheck shell=bash disable=SC2154 # what the sourcing script sets
#
# They set name, usable (the state in which workers can be reached), tries and poll_s, and define create, delete, state
# (prints that of the TPU; nothing where there is none; fails where gcloud can't tell), on_workers NUMBERS COMMAND_LINE
# and to_workers FILE TARGET.

extra=${TPU_EXTRA:-tpu} # what `setup` installs: tpu, torch_xla; torchtpu, TorchTPU

# TorchTPU, where a worker has it, needs the hosts of the slice. Without them each host would train alone.
# shellcheck disable=SC2016 # a worker expands it
slice='if [ -d .venv/lib/python3.11/site-packages/torch_tpu ]; then
    attribute() {
        curl --fail --silent --header "Metadata-Flavor: Google" \
            "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
    }
    TPU_WORKER_ID=$(attribute agent-worker-number)
    TPU_WORKER_HOSTNAMES=$(attribute worker-network-endpoints | tr , "\n" | cut -d : -f 3 | paste -s -d ,)
    case ,$TPU_WORKER_ID,$TPU_WORKER_HOSTNAMES, in
    *,,*)
        echo "the metadata server names no hosts of this slice (agent-worker-number, worker-network-endpoints)" >&2
        exit 1
        ;;
    esac
    export TPU_WORKER_ID TPU_WORKER_HOSTNAMES
fi
'

# Beside the run a worker asks the metadata server whether its host is about to end. At a notice the run saves and
# stops: by SIGUSR1, after which the SIGTERM of a host that shuts down doesn't skip the save. A notice from before the
# start stops nothing: a host may have an hour left. The signal ends this loop too.
# shellcheck disable=SC2016 # a worker expands it
watch='{
    trap exit TERM USR1
    notices() {
        ask="curl --fail --silent --max-time 3 --header Metadata-Flavor:Google"
        instance=http://metadata.google.internal/computeMetadata/v1/instance
        $ask $instance/preempted | grep -x TRUE
        $ask $instance/maintenance-event | grep -x TERMINATE_ON_HOST_MAINTENANCE
        $ask "$instance/upcoming-maintenance?alt=json" | grep -o \"ONGOING\"
    }
    earlier=$(notices)
    while sleep 5 && kill -0 $$; do
        ! notices | grep -Fvxq "$earlier" || pkill --signal USR1 --session $$ --full portable_fsdp.launch
    done
} 2> /dev/null &
'

not_set_up=66 # answer of a worker that has no checkout yet
unknown=67    # gcloud couldn't tell the state
taken=75      # answer of a worker whose run saved and stopped without `stop`: its host is about to end

call() { # runs a command, or prints it
    if $dry_run; then
        printf '%q ' "$@"
        echo
    else
        "$@"
    fi
}

say() {
    echo "${0##*/}: $*" >&2
}

setup() { # copies this checkout, as it is on disk, and installs it
    local root archive
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    archive=$root/build/portable_fsdp.tar.gz
    call mkdir -p "$root/build" || return
    call tar --create --gzip --file="$archive" --directory="$root" \
        --exclude=./.git --exclude='./.venv*' --exclude=./build --exclude=./runs . || return
    to_workers "$archive" portable_fsdp.tar.gz || return
    # The images of TPU VMs bring an older Python. apt waits for the upgrades that a new VM runs by itself.
    on_workers all "set -e
sudo apt-get -o DPkg::Lock::Timeout=600 update
sudo apt-get -o DPkg::Lock::Timeout=600 install -y python3.11-venv
mkdir -p portable_fsdp
rm -f portable_fsdp/build/installed
tar --extract --gzip --file=portable_fsdp.tar.gz --directory=portable_fsdp
cd portable_fsdp
python3.11 -m venv .venv
.venv/bin/python -m pip install --editable '.[$extra]' gcsfs
mkdir -p build
touch build/installed"
}

# The run belongs to no terminal: a lost connection doesn't end it, and the next try finds it and waits for its end.
start() {
    # The arguments become part of a command line that another shell reads: each is quoted for it.
    local arguments
    arguments=$(printf ' %q' "$@")
    on_workers all "cd portable_fsdp 2> /dev/null && [ -e build/installed ] || exit $not_set_up
${slice}log=build/run.log
touch \$log
lines=\$(wc -l < \$log)
if ! kill -0 \"\$(cat build/run.pid 2> /dev/null)\" 2> /dev/null; then
    rm -f build/run.exit build/stop
    PJRT_DEVICE=TPU setsid bash -c 'trap : TERM USR1; ${watch}\"\$@\"; echo \$? > build/run.exit; kill \$! 2> /dev/null' run \\
        .venv/bin/python -m portable_fsdp.launch --device=tpu$arguments >> \$log 2>&1 < /dev/null &
    echo \$! > build/run.pid
fi
tail --lines=+\$((lines + 1)) --follow --pid=\"\$(cat build/run.pid)\" \$log
code=\$(cat build/run.exit 2> /dev/null || echo 1)
[ \$code != 143 ] || [ -e build/stop ] || code=$taken
exit \$code"
}

logs() {
    on_workers 0 "tail --lines=100 --follow portable_fsdp/build/run.log"
}

stop() { # the run saves, and ends with 143
    on_workers all "touch portable_fsdp/build/stop
pkill --signal TERM --session \"\$(cat portable_fsdp/build/run.pid)\" --full portable_fsdp.launch"
}

doctor() {
    on_workers all "cd portable_fsdp && PJRT_DEVICE=TPU .venv/bin/python -m portable_fsdp.doctor"
}

ask() { # runs a question for a state; that there is no such TPU is an answer, any other error is none
    local errors
    { errors=$("$@" 2>&1 >&3) && return; } 3>&1
    [[ $errors == *NOT_FOUND* ]] && return
    say "no answer from gcloud: $errors"
    return "$unknown"
}

wait_until_usable() { # sets `now`: the state that it ended in
    while true; do
        now=$(state) || return "$unknown"
        case $now in
        "$usable") return 0 ;;
        CREATING | ACCEPTED | WAITING_FOR_RESOURCES | PROVISIONING | STARTING | RESTARTING) sleep "$poll_s" ;;
        *) break ;;
        esac
    done
    say "$name is ${now:-not there}"
    return 1
}

make_usable() { # creates the TPU where there is none, or one that is gone
    local code=0
    wait_until_usable || code=$?
    case $code in
    0) return 0 ;;
    "$unknown") return 1 ;; # nothing is deleted on a guess
    esac
    if [[ -z ${TPU_TYPE:-} ]]; then
        say "set TPU_TYPE to have it created"
        exit 1
    fi
    [[ -z $now ]] || delete || return
    create && wait_until_usable
}

start_on_usable() {
    local code=0
    make_usable || return 1
    start "$@" || code=$?
    if [[ $code == "$not_set_up" ]]; then
        setup || return 1
        code=0
        start "$@" || code=$?
    fi
    return "$code"
}

# Until the run has finished: where the TPU is gone, another is created, and the run goes on from its last checkpoint.
run() {
    local attempt code
    if $dry_run; then
        [[ -z ${TPU_TYPE:-} ]] || { create && setup; }
        start "$@"
        return
    fi
    for ((attempt = 1; attempt <= tries; attempt++)); do
        code=0
        start_on_usable "$@" || code=$?
        case $code in
        0 | 2) return "$code" ;; # finished; a mistake in the config, which no other try mends
        esac
        say "try $attempt of $tries ended with $code"
        sleep "$poll_s" # a TPU that is being taken away looks usable for a moment
        if [[ $code == 143 && $(state) == "$usable" ]]; then
            say "stopped on request after a save: the same command goes on from there"
            return 143
        fi
    done
    say "given up after $tries tries"
    return 1
}

main() { # of the script that sources this
    dry_run=false
    if [[ ${1:-} == --dry-run ]]; then
        dry_run=true
        shift
    fi
    [[ -n $name && -n $zone && $# -gt 0 ]] || usage
    if [[ ! $extra =~ ^(tpu|torchtpu)(,[a-z_0-9]+)*$ ]]; then
        say "TPU_EXTRA=$extra: expected tpu or torchtpu, which other extras may follow (tpu,data)."
        exit 2
    fi
    $dry_run || command -v gcloud > /dev/null || { say "gcloud isn't installed" && exit 1; }
    local action=$1
    shift
    case $action:$# in
    run:0) usage ;;
    run:*) run "$@" ;;
    create:0)
        [[ -n ${TPU_TYPE:-} ]] || usage
        create
        ;;
    setup:0 | logs:0 | stop:0 | delete:0 | doctor:0) "$action" ;;
    *) usage ;;
    esac
}

# The image that fits a type of TPU (cloud.google.com/tpu/docs/runtimes).
runtime_version() {
    case $1 in
    v6e-*) echo v2-alpha-tpuv6e ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    *) echo tpu-ubuntu2204-base ;;
    esac
}
