# The commands of this repository. `make help` lists them.

VENV ?= .venv
# An interpreter of your own with everything installed (PY=python3 on a cluster's image): nothing is set up then.
PY ?= $(VENV)/bin/python
# Arguments for a recipe: ARGS="train.total_tokens=1000000 --nproc 8".
ARGS ?=
RUNS ?= runs

ifeq ($(origin PY),file)
  READY := $(VENV)/.ready
endif

.PHONY: help setup test lint compare tensorboard clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  recipes: $(filter-out base,$(basename $(notdir $(wildcard recipes/*.yaml))))"

setup: $(READY) ## virtual environment with all dependencies, in .venv

$(VENV)/.ready: pyproject.toml constraints.txt requirements-corpus.txt launch/setup.sh
	launch/setup.sh $(VENV)
	@touch $@

recipe-%: recipes/%.yaml $(READY) ## prepare the data, train every arm of the recipe, compare them
	$(PY) -m sagebwd.cli recipe $< --runs $(RUNS) $(ARGS)

test: $(READY) ## the whole test suite (GPU tests are skipped, with a reason, where there is no GPU)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(READY) ## ruff: lint and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

compare: $(READY) ## compare the runs in RUNS/RECIPE again: make compare RECIPE=small
	$(PY) -m sagebwd.cli compare $(RUNS)/$(or $(RECIPE),small)

tensorboard: $(READY) ## TensorBoard on this machine alone, over every run
	$(PY) -m tensorboard.main --logdir $(RUNS) --host 127.0.0.1

clean: ## remove caches; runs, data and the environment stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
