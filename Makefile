# `make serve` and `make test` are all there is to know; the rest is for those who work on Fourfold.
# Everything is installed into .venv; a second call finds the stamps and starts at once.

MODEL ?= smollm2
PORT ?= 8000
HOST ?= 127.0.0.1
# More flags for `fourfold serve` or for pytest: make serve ARGS="--max-model-len 2048"
ARGS ?=
PYTHON ?= python3
# Tests that run at a time. Those of whole servers run alone: some look at times.
JOBS ?= 2
FUZZ_SECONDS ?= 600

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
SOURCES := pyproject.toml CMakeLists.txt $(shell find src native -type f -not -name '*.pyc' 2>/dev/null)
NATIVE_SOURCES = $(shell find native tests/native -name '*.cpp' -o -name '*.h')

# $(call pytest,OPTIONS): every test, or those that ARGS names.
ifeq ($(strip $(ARGS)),)
define pytest
$(BIN)/python -m pytest $(1) -n $(JOBS) --ignore=tests/e2e
$(BIN)/python -m pytest $(1) tests/e2e
endef
else
pytest = $(BIN)/python -m pytest $(1) $(ARGS)
endif

.PHONY: help serve model test test-all lint format sanitize fuzz bench soak clean
.DELETE_ON_ERROR:

help:
	@echo "make serve [MODEL=smollm2] [PORT=8000] [ARGS=...]   install, fetch the model, serve it"
	@echo "make test      install with test tools; lint, types, import rules, every quick test"
	@echo "make test-all  the slow tests too"
	@echo "make lint | format | sanitize | fuzz | bench | soak | clean"

serve: .venv/stamp-run
	@exec $(BIN)/fourfold serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: lint sanitize model
	$(call pytest,-m "not slow")

test-all: lint sanitize model
	$(call pytest,)

# Without the network the tests of the real model say so and are skipped.
model: .venv/stamp-test
	@$(BIN)/fourfold pull smollm2 || echo "tests of the real model will be skipped" >&2

lint: .venv/stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(NATIVE_SOURCES)

format: .venv/stamp-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE_SOURCES)

# Kernel tests with the native module built under AddressSanitizer and UBSan, the thread team under ThreadSanitizer.
sanitize: .venv/stamp-test
	PATH="$(CURDIR)/$(BIN):$$PATH" .ci/sanitize $(JOBS)

fuzz: .venv/stamp-test
	@$(PIP) atheris
	$(BIN)/python fuzz/seeds.py build/fuzz
	$(BIN)/python fuzz/fuzz_gguf.py build/fuzz/gguf -max_total_time=$(FUZZ_SECONDS) -max_len=8192 -rss_limit_mb=1024 -timeout=10
	$(BIN)/python fuzz/fuzz_safetensors.py build/fuzz/safetensors -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -rss_limit_mb=1024 -timeout=10

bench: .venv/stamp-run
	$(BIN)/fourfold bench engine $(MODEL) $(ARGS)

soak: .venv/stamp-test
	$(BIN)/fourfold pull $(MODEL)
	$(BIN)/python -m tests.e2e.soak --model $(MODEL) $(ARGS)
	@rm -rf build/soak
	$(BIN)/python -m tests.e2e.soak --model $(MODEL) --requests 10000 --kill --kills 20 $(ARGS) -- \
		--kv-host-cache-gib 0.0625 --kv-disk-cache-gib 0.25 --kv-disk-cache-dir $(CURDIR)/build/soak

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Fourfold needs Python 3.11 or newer; this is $$($(PYTHON) -V). Try: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || \
		{ rm -rf .venv; echo "no virtual environment could be made; on Debian: apt install python3-venv" >&2; exit 1; }

.venv/stamp-run: .venv/bin/python $(SOURCES)
	@command -v c++ >/dev/null || { echo "Fourfold compiles its kernels: install a C++20 compiler (apt install g++)" >&2; exit 1; }
	@echo "installing into .venv; compiling the kernels takes a minute or two"
	@$(PIP) .
	@touch $@

.venv/stamp-test: .venv/bin/python $(SOURCES)
	@command -v c++ >/dev/null || { echo "Fourfold compiles its kernels: install a C++20 compiler (apt install g++)" >&2; exit 1; }
	@echo "installing into .venv with the test tools"
	@$(PIP) '.[test]'
	@touch $@ .venv/stamp-run
