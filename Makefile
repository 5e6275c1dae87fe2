# Everything a fresh machine needs: `make demo` and `make test`. Both set up .venv on first use and reuse it afterwards.
#
#   PYTHON   interpreter that makes .venv (default python3, 3.11 or newer)
#   TORCH    what pip installs as torch; a CPU build is enough, e.g. TORCH='torch==2.13.0 --index-url <an index of CPU builds>'
#   ARGS     passed on: make demo ARGS='--seed 3 --pool 8', make test ARGS='-k policy'

PYTHON ?= python3
TORCH ?= torch
ARGS ?=
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
BRIEF := awk '/^ *(Collecting|Building|Installing|Successfully|ERROR|error)/ { print "  " substr($$0, 1, 110); fflush() }'
COMMA := ,
NATIVE := $(wildcard $(foreach room,kernels/cpu apexk/device/native apexk/policy/native,$(room)/src/* $(room)/include/* $(room)/build.py))

.PHONY: setup demo test test-fast test-nightly test-sanitize test-isa gate lint gpu clean
setup: $(READY)

$(READY): setup.py pyproject.toml constraints.txt $(NATIVE)
	@command -v $${CXX:-g++} >/dev/null || { echo "setup: g++ is missing: install it (Debian: apt-get install g++) or set CXX"; exit 1; }
	@echo "setup: making $(VENV) with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setup: installing torch and the other pinned packages (minutes on a first run)"
	@$(PIP) $(TORCH) 2>&1 | $(BRIEF) || { echo "setup: torch did not install; see TORCH at the top of the Makefile"; exit 1; }
	@echo "setup: building the native code and installing apexk into $(VENV)"
	@$(PIP) -e '.[test,plots]' 2>&1 | $(BRIEF)
	@# from the folder above a clone named apexk, its root would be taken for the package: the root's own entry wins over that
	@echo '$(CURDIR)' > $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/apexk_checkout.pth
	@touch $(READY)
	@echo "setup: ready"

demo: setup
	@$(BIN)/apexk demo $(ARGS)

test: setup
	@$(BIN)/python -m pytest -m "not nightly" $(ARGS)

test-fast: setup
	@$(BIN)/python -m pytest -m "not slow and not nightly" $(ARGS)

# the long ones: thousands of random traces for every policy, promises over every preset, machine, batch and pool
test-nightly: setup
	@$(BIN)/python -m pytest -m nightly $(ARGS)

# the native self-tests under the address, undefined-behaviour and thread sanitizers: the CPU kernels, every instruction set emulated
# where need be, and the transfer layer on the fake CUDA runtime
SANITIZED := $(foreach room,kernels/cpu apexk/device/native,$(foreach kinds,address-undefined thread,sanitize/$(room)/$(kinds)))
test-sanitize: $(SANITIZED)
.PHONY: $(SANITIZED)
$(SANITIZED): sanitize/%: setup
	@$(BIN)/python $(*D)/build.py --sanitize $(subst -,$(COMMA),$(*F))

# the CPU kernels' AVX-512, BF16 and AMX instructions in Bochs, against their emulation; says so where Bochs cannot be had
test-isa: setup
	@$(BIN)/python kernels/cpu/tests/bochs/compare.py

# What the Triton kernels compile to, compared with the kept table: everything for sm_90, by the installed Triton and by the one
# that such machines carry; for the others the GEMMs of the paper's models. All of it: apexk kernels aot --targets 80,86,89,90,100,120
gate: setup
	@$(BIN)/apexk kernels aot --targets 80,86,89,100,120 --gemms
	@$(BIN)/apexk kernels cuda --aot || { code=$$?; [ $$code = 3 ] || exit $$code; }
	@$(BIN)/apexk kernels aot --targets 90
	@$(BIN)/apexk kernels aot --targets 90 --triton 3.6.0 || { code=$$?; [ $$code = 3 ] || exit $$code; }

lint: setup
	@$(BIN)/ruff check .

# What a GPU machine should be asked first; needs no install, only a Python with torch, Triton and transformers.
# make gpu PART=kernels|transfer|engine|e2e|all   VIRTUAL=1 where there is no GPU
# On a GPU the results go to profiling/results/DATE-GPU-PART.json and .md unless ARGS='--json PATH'
PART ?= all
gpu:
	@$(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON)) -m profiling.gpu_suite --part $(PART) $(if $(VIRTUAL),--virtual) $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info out out.json .pytest_cache .hypothesis .ruff_cache kernels/cpu/*.so kernels/cuda/cubin
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
