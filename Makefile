# Every target works from a fresh clone with Python 3.11+ and make: what it needs, it makes.

PYTHON ?= python3
WORKERS ?= 2
MODEL ?= $(patsubst %/manifest.json,%,$(wildcard exported/*/manifest.json src/leap/runtime/shipped/*/manifest.json))
WEB ?= build/web
MUTANTS ?= src/leap/ops src/leap/runtime/streaming
NUMBER ?= 4
SEED ?= 0

VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed-by-make
PIP := $(RUN) -m pip --disable-pip-version-check -qq

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup native wheel test hf-tests gpu-check mutants journeys check bench demo docs web clean

# An environment that came along with a copied checkout points at the old place: make it anew.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name text; \
	do printf '  make %-9s %s\n' "$$name" "$$text"; done

setup: $(STAMP) ## make the environment .venv and install the commit hooks
	@if ! [ -e .git ]; then echo "no git checkout here: commit hooks left out"; \
	elif ! $(RUN) -m pre_commit install; then echo "commit hooks could not be installed; all else is ready"; fi

native: $(STAMP) ## compile the native library anew (setup has compiled it, where there is a C++ compiler)
	@$(RUN) src/native/build.py

wheel: $(STAMP) ## build a wheel for this platform into dist/, the native library in it
	@$(RUN) -m hatchling build -t wheel

test: $(STAMP) ## run the tests
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --dist worksteal

check: $(STAMP) ## run ruff, mypy, lint-imports and the tests
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-logo
	@$(MAKE) --no-print-directory test

hf-tests: $(STAMP) ## run transformers' own tests on our models; HF=its checkout brings those of generation
	@$(RUN) tests/hf/obtain.py build/hf-tests $(HF)
	@HF_TESTS=build/hf-tests OMP_NUM_THREADS=1 $(RUN) -m pytest -c tests/hf/pytest.ini -q -n $(WORKERS) tests/hf/models.py

gpu-check: $(STAMP) ## on a GPU: test every kernel, then measure; writes build/gpu-report.md
	@$(RUN) benchmarks/gpu/check.py

mutants: $(STAMP) ## break modules (MUTANTS=) on purpose, NUMBER times each, and see whether their tests notice
	@OMP_NUM_THREADS=1 $(RUN) tests/mutants.py --number $(NUMBER) --seed $(SEED) $(MUTANTS)

journeys: $(STAMP) ## count the files, functions and frames that a batch passes on its way to the kernel
	@OMP_NUM_THREADS=1 $(RUN) tests/journeys.py

bench: $(STAMP) ## measure every attention against torch's own (ten minutes)
	@$(RUN) -m leap.cli bench attention

demo: $(STAMP) ## train a small language model beside softmax, write text, show it all (5 minutes)
	@$(RUN) -m leap.cli lm demo

docs: $(STAMP) ## build the documentation site into build/site
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet && echo "wrote build/site/index.html"

web: web/node_modules/.package-lock.json ## build the page that runs MODEL, folders of leap export, in a browser into build/web
	@node web/build.mjs $(WEB) $(MODEL) && echo "wrote $(WEB); serve it: python3 -m http.server -d $(WEB)"

clean: ## remove the environment
	rm -rf $(VENV)

$(STAMP): pyproject.toml constraints.txt hatch_build.py $(wildcard src/native/*)
	@command -v $(PYTHON) >/dev/null || \
	{ echo "make: no $(PYTHON) here; install Python 3.11 or newer, or name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "make: $(PYTHON) is $$($(PYTHON) -V 2>&1); leapformer needs 3.11 or newer: make PYTHON=python3.12" >&2; exit 1; }
	@if [ -e $@ ] && [ "$$(cat $@)" != '$(CURDIR)' ]; then rm -rf $(VENV); fi
	@$(RUN) -c '' 2>/dev/null || { echo "making $(VENV)" && $(PYTHON) -m venv --clear $(VENV); }
	@echo "installing into $(VENV): a few minutes the first time"
	@# torch on its own first, so that nothing later can bring another build of it.
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install --no-warn-conflicts -c constraints.txt -e '.[app,dev,docs,explain,export,fla,lm,serve,simul,triton]'
	@# By itself, since it asks for an older tqdm than Hugging Face does, and works with a newer one.
	@$(PIP) install --no-deps -c constraints.txt simuleval
	@printf '%s' '$(CURDIR)' > $@

web/node_modules/.package-lock.json: web/package-lock.json
	@command -v npm >/dev/null || { echo "make: no npm here; install Node.js 20 or newer" >&2; exit 1; }
	@cd web && npm ci --ignore-scripts --no-audit --no-fund --silent && touch node_modules/.package-lock.json
