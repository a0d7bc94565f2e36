# Everything from a fresh clone: `make test`, `make demo`. Nothing is installed outside .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# On Linux a backend of MLX is an extra of its own (two in one environment break each other). The
# CPU's is right for tests even beside a GPU; `make EXTRAS=cuda13,test ...` picks another.
ifeq ($(shell uname -s),Darwin)
EXTRAS ?= test
else
EXTRAS ?= cpu,test
# MLX's CPU wheel brings a BLAS some 50 times slower than OpenBLAS; use that where it is installed.
BLAS := $(shell $(PYTHON) -c 'import ctypes; ctypes.CDLL("libopenblas.so.0")' 2>/dev/null \
	&& echo libopenblas.so.0)
endif

.PHONY: test demo lint types unit venv clean

test: lint types unit

venv: $(READY)

$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "velox-pack needs Python 3.11 or newer: make PYTHON=python3.x"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	touch $@

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# mypy cannot follow the mapping of folders to packages, so it reads an installed copy.
types: $(READY)
	rm -rf build $(VENV)/typecheck
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		--no-deps --no-compile --target $(VENV)/typecheck .
	rm -rf build
	cd $(VENV)/typecheck && ../bin/mypy --config-file ../../pyproject.toml \
		--cache-dir ../../.mypy_cache -p velox_pack

unit: $(READY)
	$(BIN)/pytest

# No network is needed, or used, once the environment is there.
demo: export HF_HUB_OFFLINE := 1
demo: export LD_PRELOAD := $(BLAS)
demo: $(READY)
	$(BIN)/velox-pack convert demo --out demo-bundle --overwrite
	$(BIN)/velox-pack verify demo-bundle
	$(BIN)/velox-pack eval demo-bundle
	$(BIN)/velox-pack generate demo-bundle --prompt "She opened the door, and"

clean:
	rm -rf $(VENV) build dist demo-bundle velox_pack.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
