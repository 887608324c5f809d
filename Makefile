# Everything lives in $(VENV) and out/; `make help` lists the targets. Each target sets up what it needs, once, and
# again after a change to what it was made from. The package is installed in editable mode: Python changes take effect
# at once, and ./jaxnorm, which has no compiled modules, cannot shadow the installed package.

VENV = .venv
PYTHON =
ARGS =
SECONDS = 600
# Neighbours share programs that are compiled, so workers take them in long runs.
WORKERS = -n auto --maxprocesses=8 --dist worksteal

BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --disable-pip-version-check
DONE = $(VENV)/done
# In front of what compiles. pip shows nothing of it: the backend tells the terminal, or, without one, this file.
PROGRESS = [ -t 1 ] || { export JAXNORM_PROGRESS=$(abspath $(DONE))/progress; mkdir -p $(DONE); : > $(DONE)/progress; \
  tail -f --pid=$$$$ $(DONE)/progress & };
C_SOURCES = ffi/*.h ffi/cpu/*.h ffi/cpu/*.cc ffi/launcher/*.h ffi/launcher/*.cc
FORMATTED = $(C_SOURCES) jaxnorm/_rows/*.cuh jaxnorm/_kernels/*.cuh tests/*.h

help: ## list the targets
	@echo "make TARGET [PYTHON=python3.12] [ARGS='further arguments']"
	@sed -n 's/^\([a-z-]*\):.*## /  \1: /p' Makefile | awk -F': ' '{printf "%-14s%s\n", $$1, $$2}'

demo: $(DONE)/bench ## check and time every operation here, then train three models without and with jaxnorm
	mkdir -p out
	$(BIN)/python -m jaxnorm --plot out/report.png $(ARGS)
	$(BIN)/python examples/digits.py --plot out/digits.png
	$(BIN)/python examples/resnet.py --plot out/resnet.png
	$(BIN)/python examples/transformer.py --plot out/transformer.png

test: $(DONE)/test ## run the tests, e.g. ARGS='-k softmax -x'
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(BIN)/python -m pytest $(WORKERS) $(ARGS)

fuzz: $(DONE)/test ## draw sharded programs for SECONDS=600, and compare each with one device
	$(BIN)/python tests/fuzz_sharding.py --seconds $(SECONDS) $(ARGS)

test-matrix: $(VENV)/pyvenv.cfg ## run the tests on the oldest, a middle and the newest supported jax
	$(PIP) --quiet 'nox>=2024.4'
	$(PROGRESS) $(BIN)/nox $(ARGS)

bench: $(DONE)/bench ## time every operation against XLA; results in out/
	mkdir -p out
	$(BIN)/python -m bench all --cases ci --json out/bench.json --plot out/bench.png $(ARGS)

lint: $(DONE)/dev ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(DONE)/dev ## rewrite sources in the style that lint checks
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(FORMATTED)

dev: $(VENV)/pyvenv.cfg ## switch to an install that recompiles what changed whenever jaxnorm is imported
	$(PIP) 'scikit-build-core>=0.11' 'nanobind>=2.7' cmake ninja jax
	$(PROGRESS) $(PIP) --no-build-isolation -Cbuild-dir=build/editable -Ceditable.rebuild=true -Ceditable.verbose=false -e '.[dev]'
	mkdir -p $(DONE)
	touch $(DONE)/rebuilds $(DONE)/package $(DONE)/bench $(DONE)/test $(DONE)/dev

dist: $(VENV)/pyvenv.cfg ## build the sdist, and the wheel from it, into dist/
	$(PIP) --quiet build
	$(BIN)/python -m build

clean: ## remove all that these targets made
	rm -rf $(VENV) .nox build dist out .pytest_cache .hypothesis .ruff_cache

.PHONY: help demo test fuzz test-matrix bench lint format dev dist clean

# ---- setting up ----

$(VENV)/pyvenv.cfg:
	@for python in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "creating $(VENV) with $$python"; \
	    $$python -m venv $(VENV) && exit 0; \
	    rm -rf $(VENV); exit 1; \
	  fi; \
	  if [ "$$python" = "$(PYTHON)" ]; then echo "$$python is not Python 3.11 or newer" >&2; exit 1; fi; \
	done; \
	echo "no Python 3.11 or newer found; name one with PYTHON=/path/to/python3" >&2; exit 1

# On a machine with an NVIDIA GPU, JAX with CUDA too; GPU=no leaves that out.
$(DONE)/package: $(VENV)/pyvenv.cfg pyproject.toml CMakeLists.txt _build_backend/*.py $(C_SOURCES)
	@mkdir -p $(DONE)
	@if [ ! -e $(DONE)/rebuilds ]; then \
	  extra=; \
	  if [ "$(GPU)" != no ] && nvidia-smi -L >/dev/null 2>&1; then extra='[cuda13]'; fi; \
	  echo "installing jaxnorm$$extra; compiling takes some minutes"; \
	  $(PROGRESS) $(PIP) -e ".$$extra"; \
	fi
	@touch $@

# jaxnorm itself is installed already: this adds the libraries of an extra.
$(DONE)/bench $(DONE)/test $(DONE)/dev: $(DONE)/package
	$(PIP) --quiet 'jaxnorm[$(@F)]'
	@touch $@
