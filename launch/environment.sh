# What every rank runs under, each variable with its reason. torchrun.sh sources it on each node, with the number of
# the node's processes in `nproc`. What is set already stays as it is.
#
# Here stands what must be there before Python is. The rest the ranks set themselves, however they are started: NCCL's
# variables, CUDA's and the deterministic switches are in sagebwd/training/environment.py.

# Threads of one rank. torch would take all cores for each rank, and they would only wait for one another.
cores="$(nproc)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > nproc ? cores / nproc : 1))}"

# Lines are in the log when they happen, and not lost with a killed process.
export PYTHONUNBUFFERED=1
# A crash in native code (NCCL's watchdog aborts a hung rank) leaves the Python line that each thread stood at.
export PYTHONFAULTHANDLER=1

# Compiled kernels: on the node's own disk, since a thousand ranks that compile into one home folder wait for its locks;
# one folder a job, so that no other job's half-written or older file is met. What lies there is executed: it must be ours.
if [[ -z ${TRITON_CACHE_DIR:-} || -z ${TORCHINDUCTOR_CACHE_DIR:-} ]]; then
  kernel_cache="${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/sagebwd-$UID${SLURM_JOB_ID:+-job-$SLURM_JOB_ID}"
  mkdir -p -m 700 "$kernel_cache" || exit 1
  if [[ -L $kernel_cache || ! -O $kernel_cache ]]; then
    echo "error: $kernel_cache, for compiled kernels, is not yours: remove it, or set TMPDIR to a folder of your own" >&2
    exit 2
  fi
  export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$kernel_cache/triton}"
  export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$kernel_cache/inductor}"
fi
