#!/usr/bin/env bash
# Sets up a local virtual environment with everything that training, tests and the comparison need.
set -euo pipefail

usage() {
  cat <<TEXT
Usage: launch/setup.sh VENV_FOLDER
Environment:
  PYTHON       interpreter to start from [python3]; 3.11, 3.12 or 3.13
  CONSTRAINTS  pip constraints file [constraints.txt]; empty: the newest that pyproject.toml admits
  TORCH_INDEX  where the CPU build of torch comes from, on a machine with no NVIDIA GPU
               [https://download.pytorch.org/whl/cpu]
TEXT
}

die() { echo "error: $*" >&2; exit 2; }

[ "${1:-}" != "--help" ] || { usage; exit 0; }
[ $# -eq 1 ] || { usage >&2; exit 2; }
venv=$1
python=${PYTHON:-python3}
constraints=${CONSTRAINTS-constraints.txt}
torch_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

command -v "$python" >/dev/null || die "$python is not there: install Python 3.11 or newer, or name one with PYTHON="
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
  die "$("$python" --version) is not supported: name Python 3.11, 3.12 or 3.13 with PYTHON="
"$python" -c 'import ensurepip' 2>/dev/null ||
  die "$python has no ensurepip, which a virtual environment needs: install your system's python3-venv package"

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# No colour, no question, no notice of a newer pip: a log should hold what matters.
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
pin=()
[ -z "$constraints" ] || pin=(--constraint "$constraints")

gpu=no
if nvidia-smi -L >/dev/null 2>&1; then
  gpu=yes
  echo "setup: an NVIDIA GPU is here: torch comes in its CUDA build (several GB)"
else
  echo "setup: no NVIDIA GPU is here: torch comes in its CPU build"
  # A plain `torch` from PyPI is the CUDA build. A version ending in +cpu exists as the CPU build alone, so no index
  # can hand out another; without dependencies, which PyPI serves below.
  version=$(sed -n 's/^torch==//p' constraints.txt)  # torch is pinned here even when CONSTRAINTS= lifts the rest
  "$venv/bin/python" -c "import torch, sys; sys.exit(torch.__version__ != '$version+cpu')" 2>/dev/null ||
    pip install --quiet --no-deps --retries 1 --index-url "$torch_index" "torch==$version+cpu" ||
    die "the CPU build of torch $version did not come from $torch_index: name a mirror with TORCH_INDEX="
  echo "torch==$version+cpu" >"$venv/cpu-constraint.txt"  # keeps pip from reaching for another build below
  pin+=(--constraint "$venv/cpu-constraint.txt")
fi
pip install --quiet "${pin[@]}" --editable ".[dev]"
pip install --quiet --no-deps --require-hashes --requirement requirements-corpus.txt
if [ $gpu = yes ]; then
  "$venv/bin/python" -c 'import torch, sys; sys.exit(torch.version.cuda is None)' ||
    die "pip found a CPU build of torch where a GPU is: take the index or folder that offers it out of pip's configuration"
fi
"$venv/bin/python" -c 'import torch; print("setup: torch", torch.__version__, "is ready")'
