#!/usr/bin/env bash
# Train one arm of a recipe on several ranks of this machine.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/torchrun.sh RECIPE ARM [--nproc N] [key=value ...] [--runs DIR] [--data DIR]

Trains one arm of a recipe with one process a GPU (or N processes on a CPU, over gloo), after printing the exact command.
The data-parallel size is N / parallel.tensor. A run that was stopped goes on from its latest checkpoint.

  --nproc N      processes [the number of visible GPUs; 1 without a GPU]
  key=value      a recipe's key by its dotted name, such as parallel.tensor=2
  --runs, --data as for `sagebwd train`

  launch/torchrun.sh recipes/small.yaml sagebwd --nproc 2
  launch/torchrun.sh recipes/small.yaml fpa --nproc 8 parallel.tensor=2 train.micro_batch=4

All arms and their comparison, in one command: sagebwd recipe RECIPE --nproc N
Python is $PYTHON, else .venv/bin/python of this repository, else python3.
TEXT
}

mistake() {
  echo "error: $1 (see launch/torchrun.sh --help)" >&2
  exit 2
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
nproc=""
rest=()
while (($#)); do
  case "$1" in
    -h | --help)
      usage
      exit 0
      ;;
    --nproc)
      (($# > 1)) || mistake "--nproc needs a number"
      nproc="$2"
      shift 2
      ;;
    --nproc=*)
      nproc="${1#*=}"
      shift
      ;;
    *)
      rest+=("$1")
      shift
      ;;
  esac
done
((${#rest[@]} >= 2)) || mistake "give a recipe and the name of an arm"
[[ ${rest[0]} != -* && ${rest[1]} != -* && ${rest[1]} != *=* ]] || mistake "the recipe and the arm come first"

python="${PYTHON:-$root/.venv/bin/python}"
[[ -n ${PYTHON:-} || -x $python ]] || python=python3
if [[ -z $nproc ]]; then
  nproc="$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')"
fi
[[ $nproc =~ ^[1-9][0-9]*$ ]] || mistake "--nproc is '$nproc', not a number of processes"

command=("$python" -m torch.distributed.run --standalone "--nproc-per-node=$nproc"
  -m sagebwd.cli train "${rest[0]}" --arm "${rest[1]}" "${rest[@]:2}")
printf '%q ' "${command[@]}"
echo
exec "${command[@]}"
