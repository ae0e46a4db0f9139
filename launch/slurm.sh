#!/usr/bin/env bash
# Submit a recipe to SLURM: one job an arm, which requeues itself until the arm is finished.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/slurm.sh RECIPE (--gpus N | --cpus N) [--nodes N] [--arms A,B] [--dry-run]
                       [key=value ...] [--runs DIR] [--data DIR] [-- SBATCH OPTIONS]

Checks the recipe, copies it and the code into the run folder, and submits an array of jobs, one an arm, after printing
the exact command. Jobs run that copy: later edits change nothing, for a requeued job neither. A job that reaches its
time limit or is preempted saves, is requeued and goes on. When all arms are finished, they are compared.

  --gpus N       GPUs of a node, one process each
  --cpus N       or: no GPUs, N processes a node, one core each, over gloo
  --nodes N      nodes of an arm [1]
  --arms A,B     only these arms
  --dry-run      print the command; copy and submit nothing
  key=value      a recipe's key by its dotted name, such as train.micro_batch=4
  --runs, --data as for `sagebwd recipe`; on a disk that the nodes share
  -- ...         for sbatch as it stands: --partition, --time, --account, --exclusive and so on. slurm.sbatch sets
                 --signal=B:USR1@300: the ranks save 300 seconds before the limit. Give more if a save takes longer.

  launch/slurm.sh recipes/llama-125m.yaml --gpus 8 train.micro_batch=4 -- --partition=gpu --exclusive --time=24:00:00
  launch/slurm.sh recipes/small.yaml --cpus 2 --arms fpa,sagebwd -- --time=1:00:00

Python is $PYTHON, else .venv/bin/python of this repository, else python3; the nodes must have it at the same path.
TEXT
}

mistake() {
  echo "error: $1 (see launch/slurm.sh --help)" >&2
  exit 2
}

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
recipe="" gpus="" cpus="" nodes=1 arms="" dry_run="" runs=runs data=data
overrides=() sbatch_options=()
while (($#)); do
  case "$1" in
    -h | --help)
      usage
      exit 0
      ;;
    --dry-run)
      dry_run=yes
      shift
      continue
      ;;
    --)
      shift
      sbatch_options=("$@")
      break
      ;;
    --gpus | --cpus | --nodes | --arms | --runs | --data)
      (($# > 1)) || mistake "$1 needs a value"
      option="$1" value="$2"
      shift 2
      ;;
    --gpus=* | --cpus=* | --nodes=* | --arms=* | --runs=* | --data=*)
      option="${1%%=*}" value="${1#*=}"
      shift
      ;;
    -*) mistake "unknown option $1; sbatch's own come after --" ;;
    *)
      if [[ -z $recipe ]]; then recipe="$1"; else overrides+=("$1"); fi
      shift
      continue
      ;;
  esac
  case "$option" in
    --gpus) gpus="$value" ;;
    --cpus) cpus="$value" ;;
    --nodes) nodes="$value" ;;
    --arms) arms="$value" ;;
    --runs) runs="$value" ;;
    --data) data="$value" ;;
  esac
done
[[ -n $recipe ]] || mistake "give a recipe"
[[ -n $gpus || -n $cpus ]] || mistake "give --gpus N, the GPUs of a node, or --cpus N to train without"
[[ -z $gpus || -z $cpus ]] || mistake "--gpus and --cpus exclude each other: a rank has a GPU or it has none"
nproc="$gpus$cpus"
[[ $nproc =~ ^[1-9][0-9]*$ ]] || mistake "--gpus or --cpus is '$nproc', not a number"
[[ $nodes =~ ^[1-9][0-9]*$ ]] || mistake "--nodes is '$nodes', not a number of nodes"
[[ -n $dry_run ]] || command -v sbatch >/dev/null || mistake "there is no sbatch here: submit from a node of a SLURM cluster"

python="${PYTHON:-$here/../.venv/bin/python}"
[[ -n ${PYTHON:-} || -x $python ]] || python=python3
python="$(command -v "$python")" || mistake "there is no Python at $python"
python="$(cd "$(dirname "$python")" && pwd)/$(basename "$python")"

# What the jobs would refuse is refused now, with their number of ranks.
config="$("$python" -m sagebwd.cli recipe "$recipe" "${overrides[@]}" ${arms:+--arms "$arms"} \
  --nproc $((nodes * nproc)) --print-config)" || exit
mapfile -t chosen < <(sed -n 's/^# arm \([^:]*\):.*/\1/p' <<<"$config")
name="$(sed -n "s/^name: '\{0,1\}\([^']*\)'\{0,1\}$/\1/p;T;q" <<<"$config")"

runs="$(realpath -m "$runs")" data="$(realpath -m "$data")"
# No arm can have this name, so it takes no arm's place.
snapshot="$runs/$name/_slurm/$(date +%Y%m%dT%H%M%S)-$$"
resources=("--nodes=$nodes" --ntasks-per-node=1)
if [[ -n $gpus ]]; then resources+=("--gpus-per-node=$gpus"); else resources+=("--cpus-per-task=$cpus"); fi
command=(sbatch "--job-name=sagebwd-$name" "--array=0-$((${#chosen[@]} - 1))" "${resources[@]}"
  "--output=$snapshot/%A_%a.log" "${sbatch_options[@]}" "$snapshot/launch/slurm.sbatch"
  --snapshot "$snapshot" --python "$python" --nproc "$nproc" --name "$name" --arms "$(IFS=, && echo "${chosen[*]}")"
  --runs "$runs" --data "$data" "$(basename "$recipe")" "${overrides[@]}")
if [[ -z $dry_run ]]; then
  mkdir -p "$(dirname "$snapshot")"
  "$python" -m sagebwd.job_copy "$recipe" "$snapshot"
  cp -r "$here" "$snapshot/launch"
fi
printf '%q ' "${command[@]}"
echo
[[ -n $dry_run ]] || exec "${command[@]}"
