#!/usr/bin/env bash
# Train one arm of a recipe on the GPUs of one node or several; run it once on each node.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/torchrun.sh RECIPE ARM [--nproc N] [--nodes N --node-rank R --head HOST[:PORT]]
                          [key=value ...] [--runs DIR] [--data DIR]

Trains one arm of a recipe with one process a GPU (or N processes on a CPU, over gloo), after printing the exact command.
The data-parallel size is processes / parallel.tensor. A run that was stopped goes on from its latest checkpoint.

  --nproc N      processes on this node [the number of visible GPUs; 1 without a GPU]
  --nodes N      nodes [1]. More than one: the same command on each of them, with another --node-rank, the runs and the
                 data on a disk that all of them share
  --node-rank R  this node's place: 0 on the head node, up to N - 1 [in a SLURM step: SLURM_NODEID]
  --head HOST    the head node, by a name or address that every node resolves; its port [29500] must be free
  key=value      a recipe's key by its dotted name, such as parallel.tensor=2
  --runs, --data as for `sagebwd train`

  launch/torchrun.sh recipes/small.yaml sagebwd --nproc 2
  launch/torchrun.sh recipes/small.yaml fpa --nproc 8 parallel.tensor=2 train.micro_batch=4
  launch/torchrun.sh recipes/llama-125m.yaml fpa --nodes 2 --node-rank 1 --head node17 train.micro_batch=2

SIGTERM, SIGUSR1, SIGHUP and Ctrl-C ask the ranks to save and stop; one node's signal stops all nodes. A second Ctrl-C
stops at once, without saving.

Exit codes: 0 the run is finished; 75 it was stopped, and the same command goes on; 2 a mistake, told in one line; 1 and
others: it failed.

All arms and their comparison, in one command: sagebwd recipe RECIPE --nproc N. On SLURM: launch/slurm.sh.
Python is $PYTHON, else .venv/bin/python of this repository, else python3. environment.sh beside this file holds the
variables that the ranks get, with the reason for each.
TEXT
}

mistake() {
  echo "error: $1 (see launch/torchrun.sh --help)" >&2
  exit 2
}

# Before anything else, so that no moment is left in which a signal would end this script and lose the ranks.
stop="" interrupts=0
trap 'stop=TERM' TERM HUP
trap 'stop=USR1' USR1
trap 'stop=TERM; interrupts=$((interrupts + 1))' INT

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
nproc="" nodes=1 node_rank="" head="" runs=runs
rest=()
while (($#)); do
  case "$1" in
    -h | --help)
      usage
      exit 0
      ;;
    --nproc | --nodes | --node-rank | --head | --runs)
      (($# > 1)) || mistake "$1 needs a value"
      option="$1" value="$2"
      shift 2
      ;;
    --nproc=* | --nodes=* | --node-rank=* | --head=* | --runs=*)
      option="${1%%=*}" value="${1#*=}"
      shift
      ;;
    *)
      rest+=("$1")
      shift
      continue
      ;;
  esac
  case "$option" in
    --nproc) nproc="$value" ;;
    --nodes) nodes="$value" ;;
    --node-rank) node_rank="$value" ;;
    --head) head="$value" ;;
    --runs) runs="$value" ;;
  esac
done
((${#rest[@]} >= 2)) || mistake "give a recipe and the name of an arm"
[[ ${rest[0]} != -* && ${rest[1]} != -* && ${rest[1]} != *=* ]] || mistake "the recipe and the arm come first"
arm="${rest[1]}"

python="${PYTHON:-$here/../.venv/bin/python}"
[[ -n ${PYTHON:-} || -x $python ]] || python=python3
if [[ -z $nproc ]]; then
  nproc="$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')"
fi
[[ $nproc =~ ^[1-9][0-9]*$ ]] || mistake "--nproc is '$nproc', not a number of processes"
[[ $nodes =~ ^[1-9][0-9]*$ ]] || mistake "--nodes is '$nodes', not a number of nodes"

source "$here/environment.sh"
[[ -z ${SLURM_JOB_ID:-} || -z ${kernel_cache:-} ]] || trap 'rm -rf "$kernel_cache"' EXIT # it is this job's alone

if ((nodes == 1)); then
  [[ -z $node_rank$head ]] || mistake "--node-rank and --head are for several nodes: give --nodes too"
  place=(--standalone)
else
  [[ -n $head ]] || mistake "--nodes $nodes needs --head HOST, the node that the others meet at"
  node_rank="${node_rank:-${SLURM_NODEID:-}}"
  [[ -n $node_rank ]] || mistake "--nodes $nodes needs --node-rank, this node's place from 0 to $((nodes - 1))"
  [[ $node_rank =~ ^(0|[1-9][0-9]*)$ ]] && ((node_rank < nodes)) ||
    mistake "--node-rank is '$node_rank', but $nodes nodes have the ranks 0 to $((nodes - 1))"
  port=29500
  if [[ $head == *:* ]]; then
    port="${head##*:}" head="${head%:*}"
  fi
  [[ $port =~ ^[1-9][0-9]{0,4}$ ]] && ((port < 65536)) || mistake "the port of --head is '$port', not 1 to 65535"
  address="$(getent ahostsv4 "$head" | awk '{ print $1; exit }')" || true
  [[ -n $address ]] ||
    mistake "this node cannot resolve --head '$head': give the head node's IPv4 address, or a name that all nodes know"
  # The interface that holds the address (on the head) or leads to it. gloo would take the one that this node's name
  # resolves to, which on many machines is the loopback.
  interface="$(ip -o -4 address show to "$address/32" | awk '{ print $2; exit }')"
  if ((node_rank == 0)); then
    [[ $address != 127.* ]] || mistake "--head '$head' is $address here, which no other node can reach: give its address"
    [[ -n $interface ]] || mistake "--head '$head' is $address, but this node, of --node-rank 0, has no such address"
  else
    [[ -z $interface ]] || mistake "--head '$head' is this node itself, but its --node-rank is $node_rank: the head is 0"
    interface="$(ip -o -4 route get "$address" | sed -n 's/.* dev \([^ ]*\).*/\1/p')"
    [[ -n $interface ]] || mistake "no route leads from this node to --head '$head' ($address)"
  fi
  export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"
  place=("--nnodes=$nodes" "--node-rank=$node_rank" "--master-addr=$address" "--master-port=$port")
fi

train=(-m sagebwd.cli train "${rest[0]}" --arm "$arm" "${rest[@]:2}" --runs "$runs")
# A mistake in the recipe is told once, here, and not by every rank.
config="$(WORLD_SIZE=$((nodes * nproc)) "$python" "${train[@]}" --print-config)" || exit
name="$(sed -n "s/^name: '\{0,1\}\([^']*\)'\{0,1\}$/\1/p" <<<"$config")"
folder="$runs/$name/$arm"

# torchrun ends its ranks on SIGTERM, 30 seconds later by force, and knows no SIGUSR1. So it is told of neither: this
# script hands the signal to the ranks, they save and end with 0, and so does torchrun. It has to be given some signal.
command=("$python" -m sagebwd.ranks "${place[@]}" "--nproc-per-node=$nproc" --signals-to-handle=SIGQUIT "${train[@]}")
printf '%q ' "${command[@]}"
echo

# The bit of signal $2 in process $1's mask of signals that it has a handler for.
listens() {
  local mask
  mask="$(sed -n 's/^SigCgt:\t//p' "/proc/$1/status" 2>/dev/null)" && [[ -n $mask ]] &&
    (((16#$mask >> ($(kill -l "$2") - 1)) & 1))
}

# Hand the signal to each rank that has not got it. A rank that still starts would not listen: it gets it later.
told=" " said="" ranks=""
tell_the_ranks() {
  local rank
  for rank in $ranks; do
    if [[ $told != *" $rank "* ]] && listens "$rank" "$stop" && kill -s "$stop" "$rank" 2>/dev/null; then
      told+="$rank "
    fi
  done
}

# Of torchrun, the processes that it has started; those of a moment ago once it has ended.
look_for_ranks() {
  local found=""
  read -r found <"/proc/$torchrun/task/$torchrun/children" || true
  [[ -z $found ]] || ranks="$found"
} 2>/dev/null

# Wait until process $1 is in one of the states $2 (T stopped, Z dead and not waited for), or gone.
until_state() {
  local state
  while state="$(sed -n 's/^State:\t\(.\).*/\1/p' "/proc/$1/status" 2>/dev/null)" && [[ $2 != *"$state"* ]]; do
    sleep 0.02
  done
}

# End torchrun and its ranks, whatever they do. A signal of torchrun's own would lose the ranks that it is just starting:
# they would train on. So it is stopped first, and starts no more of them.
stop_at_once() {
  kill -s STOP "$torchrun" 2>/dev/null || return 0
  until_state "$torchrun" TtZ
  look_for_ranks
  kill -s KILL "$torchrun" $ranks 2>/dev/null || true
}

fingerprint() { cksum "$folder/status.json" 2>/dev/null || true; }

before="$(fingerprint)"
[[ -z $stop ]] || exit 75
(
  trap '' TERM USR1 HUP INT # kept over exec, by torchrun and by the ranks until they install their own handlers
  exec "${command[@]}"
) &
torchrun=$!
while kill -0 "$torchrun" 2>/dev/null; do
  look_for_ranks
  if ((interrupts > 1)); then
    stop_at_once
    break
  elif [[ -n $stop ]]; then
    [[ -n $said ]] || echo "a signal asks to stop: the ranks save at the end of their step"
    said=yes
    tell_the_ranks
  fi
  # A second at most, until a signal comes: a longer wait would sleep through one that came since it was looked for.
  sleep 1 >/dev/null 2>&1 &
  wait $! || true
done
code=0
wait "$torchrun" 2>/dev/null || code=$?
# Those of a torchrun that was killed still save; with them goes the lock on the run's folder.
for rank in $ranks; do until_state "$rank" Z; done

((code != 2)) || exit 2 # a rank has said what is wrong
if [[ -n $stop && ! -e $folder/status.json ]]; then
  exit 75 # stopped before anything was written
fi
if ((code)) && [[ -z $stop && $before == "$(fingerprint)" ]]; then
  exit "$code" # it never came to train
fi
state=0
"$python" -m sagebwd.cli status "$folder" || state=$?
case $state in
  0) exit 0 ;;
  75)
    echo "stopped before the end: the same command goes on"
    exit 75
    ;;
esac
exit "$((code ? code : 1))"
