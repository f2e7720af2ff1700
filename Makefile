# SPDX-License-Identifier: Apache-2.0
# VENV=dir        environment to build or reuse          PYTHON=path     CPython 3.11 to build it with
# TORCH_INDEX=url index with +cpu builds of torch        ARGS="..."      further arguments of demo, bench and pytest
# WORKERS=n       processes that run tests; 0: this one
VENV ?= .venv
NEMO_RL ?=
VLLM ?=
FAMILY ?=
PYTHON ?=
TORCH_INDEX ?=
ARGS ?=
WORKERS ?= 2
BIN := $(VENV)/bin
# A file's tests share engines and Ray clusters, so a file stays with one worker; in the order of the folders the long
# ones come first.
PYTEST := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo docs test test-quick test-vllm test-nemo-rl gym bench lint

help:
	@echo "make setup                    environment in $(VENV); VENV=dir for another place"
	@echo "make demo                     the main job: async GRPO with rollout-aligned images, on this machine"
	@echo "make demo FAMILY=name         the same on the tiny checkpoint of qwen3_vl, qwen2_5_vl or internvl"
	@echo "make test                     every test that needs neither a NeMo-RL checkout nor NeMo-Gym"
	@echo "make test-quick               the tests that need no engine"
	@echo "make test-vllm VLLM=version   the tests that depend on vLLM against another version, in an environment of its own"
	@echo "make test-nemo-rl NEMO_RL=dir the tests against a NeMo-RL checkout, in an environment of their own"
	@echo "make gym                      the separate environment of NeMo-Gym (Python >= 3.12)"
	@echo "make bench                    the benchmarks"
	@echo "make docs                     the API reference, in docs/api"
	@echo "make lint                     rules, format, arrows between the rooms, types"

setup:
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" scripts/setup.sh "$(VENV)"

# A directory that holds a run is never written over: the next demo goes beside the last one.
demo: setup
	@case " $(ARGS) " in *" --resume "*|*" --overwrite "*|*log_dir=*) dir= ;; *) \
	    dir=runs/demo; n=1; \
	    while [ -n "$$(ls -A $$dir 2>/dev/null)" ]; do n=$$((n + 1)); dir=runs/demo-$$n; done ;; esac; \
	family=; \
	case "$(FAMILY)" in ""|nemotron) ;; *) \
	    family=$$($(BIN)/python -m nemo_rl_ext.models.tiny_families $(FAMILY) runs/tiny/$(FAMILY)) || exit 1 ;; esac; \
	$(BIN)/nemo-rl-ext grpo --config configs/embedded_async.yaml $${dir:+logger.log_dir=$$dir} $$family $(ARGS)

test: setup
	@$(BIN)/python $(PYTEST) -m "not nemo_rl and not gym" $(ARGS)

test-quick: setup
	@$(BIN)/python $(PYTEST) -m "not engine and not slow and not nemo_rl and not gym" $(ARGS)

test-vllm: setup
	@PYTHON="$(abspath $(BIN))/python" TORCH_INDEX="$(TORCH_INDEX)" ARGS="$(ARGS)" scripts/vllm_env.sh "$(VLLM)"

test-nemo-rl:
	@scripts/nemo_rl_env.sh "$(NEMO_RL)"

gym:
	@scripts/gym_env.sh

docs: setup
	@$(BIN)/python -m venv --system-site-packages build/docs-venv && build/docs-venv/bin/python -m pip install -q "pdoc>=15"
	@PYTHONPATH=$(CURDIR):$$($(BIN)/python -c "import site; print(site.getsitepackages()[0])") \
	    build/docs-venv/bin/python -m pdoc -o docs/api $(addprefix nemo_rl_ext.,align guards media rollout manifest models config)
	@echo docs/api/index.html

bench: setup
	@$(BIN)/python -m benchmarks $(ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "some files are not formatted: run ruff format ." >&2; exit 1; }
	@$(BIN)/lint-imports --no-logo --no-cache
	@$(BIN)/mypy --no-error-summary
