# What tpu_vm.sh and tpu_queued_resource.sh do alike: they source this file. Nothing to edit here.
# shellcheck shell=bash disable=SC2154 # what the sourcing script sets
#
# They set environment (the caller's exported variables, as `export -p` prints them), name, zone, where (flags of every
# gcloud command), usable (the state in which workers can be reached), slices, first_node, capacity_variable, tries and
# poll_s, and define create, delete, state (prints that of the TPU; nothing where there is none; fails where gcloud can't
# tell), on_workers NODES WORKERS COMMAND_LINE and to_workers FILE TARGET.

extra=${TPU_EXTRA:-tpu} # what `setup` installs: tpu, torch_xla; torchtpu, TorchTPU; others may follow: tpu,data
packages=${TPU_PACKAGES:-gcsfs} # and beside them; gcsfs: checkpoints in gs://; "gcsfs wandb": a tracker too
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=${TPU_PYTHON:-python3} # checks the config here, before anything is created; TPU_CHECK=false: nobody does
[[ -n ${TPU_PYTHON:-} || ! -x $root/.venv/bin/python ]] || python=$root/.venv/bin/python

names=()           # of the variables that --env hands over
local_arguments=() # the words of the run, with configs where they lie here
arguments=()       # the same, with configs where workers have them
copies=()          # of all configs, below $root
install_configs='' # commands of a worker: they put the copies of the checkout's own configs in place
flag_files=0       # how many were read
wide_flags=()      # for gcloud, from behind `--`: of every command
create_flags=()    # of create
connect_flags=()   # of ssh and scp
ssh_flags=()
scp_flags=()
track=()                # of gcloud: alpha
devices=auto hosts=auto # of TPU_TYPE: chips per host, hosts of all slices

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

refuse() {
    say "$@"
    exit 2
}

setup() { # copies this checkout, as it is on disk, and installs it
    local archive=$root/build/portable_fsdp.tar.gz
    call mkdir -p "$root/build" || return
    call tar --create --gzip --file="$archive" --directory="$root" \
        --exclude=./.git --exclude='./.venv*' --exclude=./build --exclude=./runs . "${copies[@]}" || return
    to_workers "$archive" portable_fsdp.tar.gz || return
    # The images of TPU VMs bring an older Python. apt waits for the upgrades that a new VM runs by itself. uv knows where
    # torch's wheels without CUDA are; those that pip finds bring gigabytes of libraries that no TPU uses.
    on_workers all all "set -e
sudo apt-get -o DPkg::Lock::Timeout=600 update
sudo apt-get -o DPkg::Lock::Timeout=600 install -y python3.11-venv
mkdir -p portable_fsdp
rm -f portable_fsdp/build/installed
tar --extract --gzip --file=portable_fsdp.tar.gz --directory=portable_fsdp
cd portable_fsdp
[ ! -e build/env ] || . build/env
python3.11 -m venv .venv
.venv/bin/python -m pip install uv
.venv/bin/uv pip install --python=.venv/bin/python --torch-backend=cpu --editable '.[$extra]' $packages
mkdir -p build
echo '$extra $packages' > build/installed"
}

# The variables of --env go to each worker through the standard input of its ssh, into a file that only its user can read:
# no argument, no log, no history and no file of this machine has their values. One worker after the other: with
# --worker=all gcloud starts all its ssh on the same standard input, and one of them gets it. A file without its last line,
# of a connection that broke, replaces none.
hand_over() {
    ((${#names[@]})) || return 0
    local node worker count
    local command="mkdir -p portable_fsdp/build && cd portable_fsdp/build && umask 077 && rm -f env.new && cat > env.new &&
tail -n 1 env.new | grep -qx '# end' && mv env.new env"
    if $dry_run; then
        echo "# to each worker of each node, with the values on standard input: ${names[*]}"
        on_workers NODE WORKER "$command"
        return
    fi
    count=$(gcloud compute tpus tpu-vm describe "$first_node" "${where[@]}" --format='json(networkEndpoints)' |
        grep -c '"ipAddress"') || { say "gcloud lists no workers of $first_node (networkEndpoints)" && return 1; }
    for ((node = 0; node < slices; node++)); do
        for ((worker = 0; worker < count; worker++)); do
            exports "${names[@]}" | on_workers "$node" "$worker" "$command" || return
        done
    done
}

# Prints the caller's values. They become local variables here, so that a name of this script's own is no problem. printf
# is bash's own: no process has the values as arguments.
exports() {
    eval "$environment" 2> /dev/null || true # a readonly variable stays as it is
    while (($#)); do
        printf 'export %s=%q\n' "$1" "${!1}"
        shift
    done
    echo '# end'
}

# The run belongs to no terminal: a lost connection doesn't end it, and the next try finds it and waits for its end.
start() {
    # The arguments become part of a command line that another shell reads: each is quoted for it.
    local quoted load='' old=' build/env' there=''
    quoted=$(printf ' %q' "$@")
    if ((${#names[@]})); then load='. build/env || exit; ' old=''; fi
    ((${#copies[@]} == 0)) || there=$(printf ' && [ -e %q ]' "${copies[@]}")
    on_workers all all "cd portable_fsdp 2> /dev/null && grep -qsxF '$extra $packages' build/installed$there || exit $not_set_up
${slice}log=build/run.log
touch \$log
lines=\$(wc -l < \$log)
if ! kill -0 \"\$(cat build/run.pid 2> /dev/null)\" 2> /dev/null; then
    rm -f build/run.exit build/stop$old$install_configs
    PJRT_DEVICE=TPU setsid bash -c '${load}trap : TERM USR1; ${watch}\"\$@\"; echo \$? > build/run.exit; kill \$! 2> /dev/null' run \\
        .venv/bin/python -m portable_fsdp.launch --device=tpu$quoted >> \$log 2>&1 < /dev/null &
    echo \$! > build/run.pid
fi
tail --lines=+\$((lines + 1)) --follow --pid=\"\$(cat build/run.pid)\" \$log
code=\$(cat build/run.exit 2> /dev/null || echo 1)
[ \$code != 143 ] || [ -e build/stop ] || code=$taken
exit \$code"
}

logs() {
    on_workers 0 0 "tail --lines=100 --follow portable_fsdp/build/run.log"
}

stop() { # the run saves, and ends with 143
    on_workers all all "touch portable_fsdp/build/stop
pkill --signal TERM --session \"\$(cat portable_fsdp/build/run.pid)\" --full portable_fsdp.launch"
}

doctor() {
    on_workers all all "cd portable_fsdp && PJRT_DEVICE=TPU .venv/bin/python -m portable_fsdp.doctor"
}

ask() { # runs a question for a state; that there is no such TPU is an answer, any other error is none
    local errors
    { errors=$("$@" 2>&1 >&3) && return 0; } 3>&1 # in a trap a bare `return` has the status from before it
    [[ $errors == *NOT_FOUND* ]] && return 0
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
    code=0
    create || code=$?
    [[ $code != 2 ]] || refuse "gcloud takes no such \`create\`: correct the variables, or the flags behind \`--\`."
    [[ $code == 0 ]] && wait_until_usable
}

start_on_usable() {
    local code=0
    make_usable || return 1
    hand_over || return 1
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
        [[ -z ${TPU_TYPE:-} ]] || create
        hand_over
        [[ -z ${TPU_TYPE:-} ]] || setup
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
            say "stopped on request after a save; rerun the same command to resume"
            return 143
        fi
    done
    say "given up after $tries tries"
    return 1
}

read_words() { # sorts the words of the command line: --env, those of the run, and behind `--` those of gcloud
    local word list
    while (($#)); do
        word=$1
        shift
        case $word in
        --) gcloud_flags "$@" && return ;;
        -h | --help) usage ;;
        --env) refuse "--env: write --env=NAME,..." ;;
        --env=*)
            IFS=, read -ra list <<< "${word#--env=}"
            names+=("${list[@]}")
            ;;
        --config | --import | --flagfile)
            (($#)) || refuse "$word: expected a file: $word=FILE."
            set -- "$word=$1" "${@:2}"
            ;;
        --flagfile=*) # its lines in place of it: one word each, as launch reads them
            [[ -f ${word#*=} ]] || refuse "$word: no such file."
            ((++flag_files <= 100)) || refuse "$word: this flag file reads itself."
            mapfile -t list < <(sed -E 's/^[[:space:]]+|[[:space:]]+$//g; /^(#|\/\/|$)/d' "${word#*=}")
            set -- "${list[@]}" "$@"
            ;;
        --config=* | --import=*)
            copy_config "${word#*=}"
            local_arguments+=("$word")
            arguments+=("${word%%=*}=$shipped")
            ;;
        *)
            local_arguments+=("$word")
            arguments+=("$word")
            ;;
        esac
    done
}

check_names() {
    local variable
    for variable in "${names[@]}"; do
        [[ $variable =~ ^[A-Za-z_][A-Za-z_0-9]*$ ]] ||
            refuse "--env=${variable%%=*}: expected names of variables, without values: --env=HF_TOKEN,WANDB_API_KEY."
        [[ $environment =~ (^|[[:space:]])declare\ -[a-z]*x[a-z]*\ $variable= ]] ||
            refuse "--env=$variable: $variable isn't set here. Set and export it first."
    done
}

# The flags are those of Google's reference of gcloud; one that isn't named here is create's, which refuses what it doesn't
# know before it creates anything. `target`: the commands that get the flag, the variable to set instead, or nothing for a
# flag of ours.
gcloud_flags() {
    local word flag target
    for word in "$@"; do
        flag=${word%%=*}
        case ${flag/#--no-/--} in
        --zone) target=TPU_ZONE ;;
        --project) target=TPU_PROJECT ;;
        --accelerator-type | --type | --topology) target=TPU_TYPE ;;
        --version | --runtime-version) target=TPU_VERSION ;;
        --spot | --preemptible | --reserved | --best-effort | --guaranteed | --provisioning-model) target=$capacity_variable ;;
        --node-count) target=TPU_SLICES ;;
        --valid-until-duration | --valid-until-time) target=TPU_VALID_UNTIL ;;
        --node | --node-id | --node-prefix | --worker | --command | --output-directory | --recurse | --async | --dry-run | \
            --format | --quiet | --queue-count) target='' ;;
        --tunnel-through-iap | --batch-size | --internal-ip | --ssh-key-file | --ssh-key-expiration | --plain | \
            --ssh-key-expire-after | --strict-host-key-checking | --force-key-file-overwrite) target=connect ;;
        --ssh-flag) target=ssh ;;
        --scp-flag | --compress) target=scp ;;
        --account | --access-token-file | --configuration | --impersonate-service-account | --billing-project | \
            --verbosity) target=wide ;;
        --*) target=create ;;
        *) refuse "$word: expected a flag of gcloud behind --, with its value behind =: --network=mine." ;;
        esac
        # shellcheck disable=SC2034 # tpu_vm.sh reads it: tpu-vm ssh has these two in this track alone
        case $flag in --tunnel-through-iap | --batch-size) track=(alpha) ;; esac
        case $target in
        '') refuse "$word: contradicts ${0##*/}, which sets this flag itself." ;;
        TPU_*) refuse "$word: contradicts ${0##*/}; set $target instead." ;;
        create) create_flags+=("$word") ;;
        connect) connect_flags+=("$word") ;;
        ssh) ssh_flags+=("$word") ;;
        scp) scp_flags+=("$word") ;;
        wide) wide_flags+=("$word") ;;
        esac
    done
    where+=("${wide_flags[@]}")
}

# What is checked here is what runs: each config goes into the archive under a name with its checksum, so that a worker
# without it is set up again. Sets `shipped`, the path on workers: for a config of the checkout its own path, beside the
# modules that it names.
copy_config() {
    local path copy
    shipped=$1
    [[ -f $1 ]] || return 0 # the check says so
    path=$(cd "$(dirname "$1")" && pwd -P)/${1##*/}
    copy=build/configs/$(cksum < "$1" | cut -d ' ' -f 1)-${1##*/}
    call mkdir -p "$root/build/configs"
    call cp "$1" "$root/$copy"
    copies+=("$copy")
    shipped=$copy
    case $path in
    "$root"/build/* | "$root"/runs/* | "$root"/.git/* | "$root"/.venv*) ;; # not in the archive
    "$root"/*)
        shipped=${path#"$root"/}
        install_configs+=$(printf '\n    install -D --mode=644 %q %q || exit' "$copy" "$shipped")
        ;;
    esac
}

count_chips() { # refuses a size that Google doesn't have (cloud.google.com/tpu/docs/supported-tpu-configurations)
    local size=${TPU_TYPE##*-} wrong="TPU_TYPE=$TPU_TYPE: expected"
    [[ $slices =~ ^[1-9][0-9]*$ ]] || refuse "TPU_SLICES=$slices: expected a number of at least 1."
    [[ $TPU_TYPE =~ -[1-9][0-9]*$ ]] || refuse "$wrong a type and its size, such as v6e-8."
    case $TPU_TYPE in
    tpu7x-*) refuse "TPU_TYPE=$TPU_TYPE: Google has TPU7x on GKE alone, not as a TPU VM: launch/gke_jobset_tpu.yaml." ;;
    v6e-[148] | v5litepod-[148]) devices=$size hosts=$slices ;;
    v6e-* | v5litepod-*)
        ((size % 16 == 0)) || refuse "$wrong 1, 4 or 8 chips, or a multiple of 16."
        devices=4 hosts=$((size * slices / 4))
        ;;
    v4-* | v5p-*)
        ((size % 8 == 0)) || refuse "$wrong a multiple of 8: two cores per chip, four chips per host."
        devices=4 hosts=$((size * slices / 8))
        ;;
    esac
}

check() { # of the config with the run's own words, here; ends with 2 for a mistake
    local words=() engine=xla word explained
    [[ ,$extra, != *,torchtpu,* ]] || engine=native
    # --verbose is a flag of launch alone; what auto means here isn't what it means there.
    for word in "$@"; do [[ $word == --verbose || $word == --backend=auto ]] || words+=("$word"); done
    words=(-m portable_fsdp.explain --strict --json --device=tpu --backend="$engine" --num_devices="$devices"
        --num_hosts="$hosts" "${words[@]}")
    if $dry_run; then
        echo "# before anything else, here: python$(printf ' %q' "${words[@]}")"
        return
    fi
    if [[ ${TPU_CHECK:-true} == false ]]; then
        say "TPU_CHECK=false: a mistake in the config will only show on the TPU"
        return
    fi
    here() { PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} "$python" "$@"; }
    here -c 'import portable_fsdp.explain' 2> /dev/null ||
        refuse "the config is checked here first, for which $python lacks packages: $python -m pip install pydantic PyYAML" \
            "huggingface_hub. TPU_PYTHON=... names another Python (3.11 or newer), TPU_CHECK=false skips the check."
    explained=$(here "${words[@]}") || exit
    here "$root/launch/tpu_check.py" "$extra" "$packages" "${names[*]}" <<< "$explained" || exit
}

still_costs() { # when the script ends: names what is left, and the command that ends it
    local code=$? there costs="may cost" words=("TPU_NAME=$name" "TPU_ZONE=$zone" ${project:+"TPU_PROJECT=$project"})
    [[ $code != 0 || $action == run ]] || return 0
    there=$(state 2> /dev/null) || there="no answer from gcloud"
    [[ -n $there ]] || return 0
    [[ $there != "$usable" ]] || costs=costs
    say "$name in $zone ($there) is still there, and $costs money until you delete it:"
    words+=("$0" delete)
    ((${#wide_flags[@]} == 0)) || words+=(-- "${wide_flags[@]}")
    echo " $(printf ' %q' "${words[@]}")" >&2
}

main() { # of the script that sources this
    dry_run=false
    if [[ ${1:-} == --dry-run ]]; then
        dry_run=true
        shift
    fi
    [[ -n $name && -n $zone && $# -gt 0 ]] || usage
    action=$1
    shift
    if [[ ! $extra =~ ^(tpu|torchtpu)(,[a-z_0-9]+)*$ || $extra == *tpu*tpu* ]]; then
        refuse "TPU_EXTRA=$extra: expected tpu or torchtpu, which other extras may follow (tpu,data)."
    fi
    [[ $packages =~ ^[A-Za-z0-9._\ -]+$ ]] || refuse "TPU_PACKAGES=$packages: expected names of packages, without versions."
    read_words "$@"
    [[ $action == run || ${#names[@]} == 0 ]] || refuse "--env: only \`run\` hands variables over."
    check_names
    case $action in
    run | create | setup)
        [[ -f $root/pyproject.toml ]] ||
            refuse "$root has no pyproject.toml, from which workers install: run ${0##*/} in a checkout of the project."
        [[ -z ${TPU_TYPE:-} || $action == setup ]] || count_chips
        ;;
    esac
    $dry_run || command -v gcloud > /dev/null || { say "gcloud isn't installed" && exit 1; }
    case $action:${#arguments[@]} in
    run:0) usage ;;
    run:*) check "${local_arguments[@]}" ;;
    create:0) [[ -n ${TPU_TYPE:-} ]] || usage ;;
    setup:0 | logs:0 | stop:0 | delete:0 | doctor:0) ;;
    *) usage ;;
    esac
    case $dry_run:$action in
    false:run | false:create | false:setup) trap still_costs EXIT ;;
    esac
    "$action" "${arguments[@]}"
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
