# The commands of this repository. `make help` lists them.

VENV ?= .venv
# An interpreter of your own with everything installed (PY=python3 on a cluster's image): nothing is set up then.
PY ?= $(VENV)/bin/python
# Arguments for a recipe: ARGS="train.total_tokens=1000000 --nproc 8".
ARGS ?=
RUNS ?= runs
# For compile-check: another Triton than the environment's (TRITON=3.6.0), every configuration (FULL=1).
TRITON ?=
FULL ?=

ifeq ($(origin PY),file)
  READY := $(VENV)/.ready
endif

.PHONY: help setup test fuzz lint parity survive compare bench bench-context doctor compile-check sanitize tensorboard clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  recipes: $(filter-out base%,$(basename $(notdir $(wildcard recipes/*.yaml))))"

setup: $(READY) ## virtual environment with all dependencies, in .venv

$(VENV)/.ready: pyproject.toml constraints.txt requirements-corpus.txt launch/setup.sh
	launch/setup.sh $(VENV)
	@touch $@

recipe-%: recipes/%.yaml $(READY) ## prepare the data, train every arm of the recipe, compare them
	$(PY) -m sagebwd.cli recipe $< --runs $(RUNS) $(ARGS)

test: $(READY) ## the whole test suite (GPU tests are skipped, with a reason, where there is no GPU)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal $(ARGS)

fuzz: $(READY) ## malformed recipes, corpora, data and runs, by the ten thousand
	FUZZ=20 OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal tests/fuzz $(ARGS)

lint: $(READY) ## ruff: lint and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

compare: $(READY) ## compare the runs in RUNS/RECIPE again: make compare RECIPE=small
	$(PY) -m sagebwd.cli compare $(RUNS)/$(or $(RECIPE),small)

parity: $(READY) ## every layout of ranks against one: two GPUs or more if there are, else CPUs; writes a report
	OMP_NUM_THREADS=1 $(PY) -m tests.distributed.parity $(ARGS)

survive: $(READY) ## kill, stop, damage and starve training 300 times; docs/survival.md is what came of it
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(PY) -W ignore -m tests.survival --megatron 200 --deepspeed 100 \
	  --counts .survive.json --table docs/survival.md $(ARGS)

bench: $(READY) ## SageBwd against full-precision attention on this machine's GPU: ARGS=--quick takes under a minute
	$(PY) -m sagebwd.kernels.benchmarks.bench $(ARGS)

bench-context: $(READY) ## attention with its tokens on two GPUs against one: time, memory, what is gathered
	$(PY) -m torch.distributed.run --standalone --nproc-per-node 2 -m sagebwd.kernels.benchmarks.context $(ARGS)

doctor: $(READY) ## what is installed, which backend a call gets here and why, a self-test of the kernels
	@$(PY) -m sagebwd.cli doctor

compile-check: $(READY) $(TRITON:%=$(VENV)/triton-%/.ready) ## compile the kernels for six GPU generations, without a GPU
	PYTHONPATH=$(TRITON:%=$(VENV)/triton-%) $(PY) -m sagebwd.kernels.compile_check $(if $(FULL),--full) $(ARGS)

# Allocations of their own, so that a read past a tensor's end is past an allocation's. What racecheck says of Hopper's
# kernels, and why they are left out of it: kernels/hopper/NOTES.md.
sanitize: $(READY) ## compute-sanitizer over every kernel (needs an NVIDIA GPU and the CUDA toolkit)
	$(PY) -m sagebwd.kernels.every_kernel
	for tool in memcheck synccheck "racecheck --kernel-name-exclude kernel_substring=hopper"; do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
	    $(PY) -m sagebwd.kernels.every_kernel || exit 1; done

$(VENV)/triton-%/.ready:
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) triton==$*
	@touch $@

tensorboard: $(READY) ## TensorBoard on this machine alone, over every run
	$(PY) -m tensorboard.main --logdir $(RUNS) --host 127.0.0.1 $(ARGS)

clean: ## remove caches; runs, data and the environment stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
