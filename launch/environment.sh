# What every rank runs under, each variable with its reason. torchrun.sh sources it on each node, with the number of
# the node's processes in `nproc`. What is set already stays as it is.

# Threads of one rank. torch would take all cores for each rank, and they would only wait for one another.
cores="$(nproc)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > nproc ? cores / nproc : 1))}"

# Lines are in the log when they happen, and not lost with a killed process.
export PYTHONUNBUFFERED=1
# A crash in native code (NCCL's watchdog aborts a hung rank) leaves the Python line that each thread stood at.
export PYTHONFAULTHANDLER=1

# Deterministic cuBLAS: one workspace of a fixed size, so that a product does not choose its algorithm by what is free.
export CUBLAS_WORKSPACE_CONFIG="${CUBLAS_WORKSPACE_CONFIG:-:4096:8}"
# No reduction inside the NVLink switch: it sums in another order than rings and trees do, so that losses would depend on
# the machine, and it needs a multicast service that containers and virtual machines often lack (NCCL then fails at start).
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"

# A collective that fails or outlasts its time-out ends its process, and so the run, instead of waiting for ever. The
# time-out, NCCL's as gloo's, is the recipe's: a minute more than health.hang_minutes, so that the run's own watchdog is
# first, which knows the rank that the others wait for.
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-3}"

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
