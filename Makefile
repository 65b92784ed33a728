# From a clean clone, in a folder of any name: `make serve` runs a server, `make test` runs the tests. Neither needs anything before.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
MODEL ?=
FLAGS ?=
WHAT ?= cpu
# torch on its own first, and pinned to what is tested; the package itself accepts 2.11 and newer. Whether this is the CPU build or
# gigabytes of CUDA depends on the indexes that pip is configured with. Another one: make install TORCH='torch==2.13.0 --index-url ...'
TORCH := torch==2.13.0

CHECKED := proto kernels shard router launcher demo simulator bench benchmarks  # as in pyproject.toml
SERVING := proto kernels shard router launcher  # what clients reach

.PHONY: install serve plan test lint audit format proto kernels bench clean

install: $(INSTALLED)

# Made again when the dependencies change, and only then. Compiled by all cores, where pip takes one, and without the third of it that
# is seldom read; some packages bring what is no Python.
$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "penstock needs Python 3.11 or newer: make PYTHON=python3.12 ..."'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv  # one that is half-made is made anew
	$(BIN)/python -m pip install --quiet --no-compile $(TORCH)
	$(BIN)/python -m pip install --quiet --no-compile -e '.[dev,deploy,images,otel]'
	$(BIN)/python -m compileall -qq -j 0 -x '/(tests|transformers/models)/' .venv/lib || true
	touch $(INSTALLED)

# make serve MODEL=folder FLAGS='--port 8080'
serve: $(INSTALLED)
	@$(BIN)/penstock serve $(if $(MODEL),'$(MODEL)') $(FLAGS)

plan: $(INSTALLED)
	@$(BIN)/penstock plan $(if $(MODEL),'$(MODEL)') $(FLAGS)

# Three at once: on two cores two compute while one waits, as many tests do. A file's tests stay together, for the servers they share.
# What Python compiles is kept, whatever the environment says: else each of the hundreds of processes compiles all that it imports.
test: $(INSTALLED)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -p no:cacheprovider -p xdist --numprocesses 3 --dist loadfile

# The root is the package, and tools take the checkout's folder for its name: through this link that is always `penstock`.
build/penstock:
	mkdir -p build
	ln -sfn .. build/penstock

lint: $(INSTALLED) build/penstock
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive $(SERVING)
	cd build && ../$(BIN)/mypy --config-file ../pyproject.toml --explicit-package-bases $(CHECKED:%=penstock/%)

format: $(INSTALLED)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# Known vulnerabilities of what is installed. Asks PyPI, so it needs a network that has it; without, it fails, and is no part of `lint`.
audit: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -e '.[audit]'
	$(BIN)/python -m pip_audit --local --skip-editable --strict --progress-spinner off

# Through the link the generated module lands in proto/ and says `penstock.proto`.
proto: $(INSTALLED) build/penstock
	$(BIN)/python -m grpc_tools.protoc -Ipenstock/proto=proto --python_out=build --pyi_out=build penstock/proto/shard.proto

# Every kernel for every kind of accelerator: registers, spills, shared memory. Needs none of them, but Triton (Linux).
kernels: $(INSTALLED)
	$(BIN)/python -m penstock.kernels.compile $(FLAGS)

# make bench WHAT=latency: one of benchmarks/*.py
bench: $(INSTALLED)
	$(BIN)/python benchmarks/$(WHAT).py $(FLAGS)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
