# shellcheck shell=bash
# Functions of the job scripts; each node sources it, too, for load_environment.
#
# SLURM stops a job by SIGUSR1 to the batch script (before its time limit) or by SIGTERM to all
# processes (preemption, scancel). The run then saves a checkpoint and writes result.json, and the
# job is requeued, to resume in the same run directory.

refuse() { # print the error and exit as training does for an error in the config
    echo "$*" >&2
    exit 2
}

load_environment() { # modules, the virtual environment, addresses: see cluster.env.example
    local file=${TITANLIKE_ENV:-$SLURM_SUBMIT_DIR/cluster.env}
    [ "${file#/}" != "$file" ] || file=$SLURM_SUBMIT_DIR/$file
    if [ ! -r "$file" ]; then
        [ -z "${TITANLIKE_ENV:-}" ] || refuse "TITANLIKE_ENV=$TITANLIKE_ENV: cannot be read on $(hostname)"
        return 0
    fi
    environment_file=$file
    set +u # modules and conda read variables that are not set
    # shellcheck disable=SC1090
    source "$file"
    set -u
}

# train.py of a checkout, if the job runs in one, else the installed package
find_program() {
    if [ -f train.py ]; then program=(train.py); else program=(-m titanlike); fi
}

# find_run_dir DEFAULT ARGS...: sets `run_dir`, and `arguments` to all arguments
find_run_dir() {
    local default=$1 word before="" config=""
    shift
    run_dir=""
    for word in "$@"; do
        case $before in --config-path | -cp) config=$word/config.yaml ;; esac
        case $word in
            run_dir=* | +run_dir=* | ++run_dir=*) run_dir=${word#*=} ;;
            --config-path=*) config=${word#*=}/config.yaml ;;
        esac
        before=$word
    done
    arguments=("$@")
    if [ -z "$run_dir" ] && [ -f "$config" ]; then # an earlier run, which resumes in its run directory
        run_dir=$(sed -n 's/^run_dir: *//p' "$config")
        case $run_dir in
            *"\${"*) run_dir="" ;;
            /* | [\'\"]/*) run_dir=${config%/config.yaml} ;; # which may have been moved or copied
        esac
    fi
    if [ -z "$run_dir" ]; then
        run_dir=$default
        arguments+=("run_dir=$default")
    fi
    run_dir=${run_dir#[\'\"]}
    run_dir=${run_dir%[\'\"]}
    case $run_dir in
        *"\${"*) refuse "run_dir=$run_dir: would change after a requeue; write run_dir=$default" ;;
    esac
}

# check RANKS ARGS...: one process checks the config, for RANKS in all, before any node starts; with
# REHEARSE=1 also that no rank can wait for another for ever
check() {
    local ranks=$1 code=0
    shift
    WORLD_SIZE=$ranks python "${program[@]}" --check "$@" >/dev/null || code=$?
    [ "$code" = 0 ] || exit "$code"
    [ -n "${REHEARSE:-}" ] && [ "${SLURM_RESTART_COUNT:-0}" = 0 ] || return 0
    python -m titanlike rehearse "$@" || exit
}

# opening RANKS: the first lines of each start in the log. RANKS: per node
opening() {
    local commit array="" nodes
    commit=$(git rev-parse --short HEAD 2>/dev/null) && commit=", git commit $commit"
    [ -z "$commit" ] || git diff --quiet HEAD 2>/dev/null || commit+=" with changes"
    [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || array=", task $SLURM_ARRAY_TASK_ID of array $SLURM_ARRAY_JOB_ID"
    nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr '\n' ' ')
    cat <<END
job        $SLURM_JOB_ID ($SLURM_JOB_NAME)$array
start      $(date '+%F %T'), restart ${SLURM_RESTART_COUNT:-0}
nodes      $SLURM_JOB_NUM_NODES: ${nodes% }
ranks      $1
env file   ${environment_file:-none}
END
    python - <<'END'
import platform, sys
from importlib.metadata import PackageNotFoundError, version

def installed(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"

print(f"python     {platform.python_version()} ({sys.executable})")
print(f"torch      {installed('torch')}")
print(f"titanlike  {installed('titanlike')}", end="", flush=True)
END
    printf '%s\n' "$commit" "run        $run_dir" ""
}

# Ports of jobs that share a node differ, and are below the system's ephemeral ports (from 32768)
port() { echo "${MASTER_PORT:-$((20000 + SLURM_JOB_ID * 101 % 12000))}"; }

# SLURM's address of the first node: its name may be unknown to DNS
head_address() {
    local head address
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    address=$(scontrol --oneliner show node "$head" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    echo "${MASTER_ADDR:-${address:-$head}}"
}

# share_cores RANKS: OpenMP threads of each of a node's RANKS
share_cores() {
    local cores=${SLURM_CPUS_ON_NODE:-$1} threads
    if [ "$cores" -lt "$1" ]; then
        echo "WARNING: $1 ranks of a node share $cores of its cores; submit with --exclusive or --cpus-per-task=N"
    fi
    threads=$((cores / $1))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
}

# Whether this version of torchrun has an option; found without importing torch
torchrun_has() {
    python - "$1" <<'END'
import importlib.util, pathlib, sys

folder = pathlib.Path(importlib.util.find_spec("torch").origin).parent
sys.exit(f'"{sys.argv[1]}"' not in (folder / "distributed" / "run.py").read_text())
END
}

# From here on the signal that stops this job is recorded as `asked`, and forwarded once: a second
# one would end the run without a checkpoint
listen() {
    asked="" step=""
    trap 'heard USR1' USR1
    trap 'heard TERM' TERM
}

heard() {
    # not as SIGTERM, by which srun kills all ranks at once
    [ -n "$asked" ] || [ -z "$step" ] || kill -USR1 "$step" 2>/dev/null
    asked=$1
}

# on_nodes SRUN_OPTIONS... -- COMMAND...: the command as SLURM's tasks; its exit code is `code`
on_nodes() {
    local options=()
    while [ "$1" != -- ]; do options+=("$1") && shift; done
    shift
    code=75
    [ -z "$asked" ] || return 0
    # a step does not take this from sbatch by itself
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    # a rank that dies takes the step with it, instead of leaving nodes idle until the time limit
    # shellcheck disable=SC2016,SC2154
    srun --kill-on-bad-exit=1 "${options[@]}" \
        bash -uc 'source "$0/common.sh"; load_environment; exec "$@"' "$tools" "$@" &
    step=$!
    while true; do # a signal ends `wait`, not the step
        code=0
        wait "$step" || code=$?
        kill -0 "$step" 2>/dev/null || break
    done
}

# train SRUN_OPTIONS... -- COMMAND...: a run, to its end or to a requeue
train() {
    local before
    before=$(cat "$run_dir/result.json" 2>/dev/null)
    note_start
    on_nodes "$@"
    end "$(status_since "$before")"
}

# sweep SRUN_OPTIONS... -- COMMAND...: the same for a sweep, whose exit code says how it ended
sweep() {
    note_start
    on_nodes "$@"
    case $code in
        0) end completed ;;
        75) end stopped ;;
        130 | 138 | 143) end interrupted ;;
        *) exit "$code" ;;
    esac
}

# status_since EARLIER: the status in result.json; nothing if that is still the EARLIER one, because
# no rank could write it. torchrun's exit code does not help: it is 1 after a signal, too
status_since() {
    local result
    for _ in 1 2 3 4 5 6 7 8 9 10; do # a shared file system may show another node's file late
        result=$(cat "$run_dir/result.json" 2>/dev/null)
        if [ "$result" != "$1" ] || [ -z "$asked" ] || [ "$code" = 0 ]; then break; fi
        sleep 1
    done
    [ "$result" != "$1" ] || return 0
    python - "$result" <<'END'
import json, sys

result = json.loads(sys.argv[1])
print("max_time" if "by max_time" in (result["error"] or "") else result["status"])
END
}

# Steps completed by a run, or by all jobs of a sweep
steps_done() { find "$run_dir" -maxdepth 2 -name metrics.jsonl -exec cat {} + | wc -l; }

note_start() {
    starts=$run_dir/logs/slurm-$SLURM_JOB_ID.starts
    mkdir -p "$run_dir/logs" && steps_done >>"$starts" || exit 1
}

# end STATUS: requeue the job if SLURM has stopped it, else exit as the run did
end() {
    local steps job=$SLURM_JOB_ID
    [ -z "${SLURM_ARRAY_JOB_ID:-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    case $1 in
        completed) exit 0 ;; # a signal may have arrived during the shutdown
        stopped) ;;
        interrupted | '') [ -n "$asked" ] || exit "$code" ;; # before the first step, or after the last save
        max_time) exit 75 ;;
        *) exit 1 ;; # failed; srun's own code may be of a rank that it has ended
    esac
    # a job that its user has cancelled is COMPLETING; a requeue would start it again
    [ "$(squeue --noheader --jobs "$job" --format %T)" = RUNNING ] || exit 75
    steps=$(steps_done)
    if [ "$(wc -l <"$starts")" -gt 1 ] && [ "$steps" -le "$(tail -n 2 "$starts" | head -n 1)" ]; then
        echo "not requeued: two starts in a row completed no new step; is the time limit too short?" >&2
        exit 1
    fi
    echo "requeued after $steps steps; the next start resumes in $run_dir"
    scontrol requeue "$job" || exit 75
    exit 0
}
