# Every target sets up what it needs in .venv; a second run is quick (the stamps carry a hash of what was installed).
PYTHON ?= python3
PORT ?= 8000
ARGS ?=

PY := .venv/bin/python
KEY := $(shell cat pyproject.toml setup.py build_kernels.py | cksum | cut -d ' ' -f 1)
READY := .venv/ready-$(KEY)
# Without a GPU kernels would take minutes to compile and never run; `make kernels` compiles them anywhere.
INSTALL_ARCHS := $(or $(SPARKRT_CUDA_ARCHS),$(if $(wildcard /dev/nvidiactl /dev/dxg),,none))
INSTALL := $(if $(INSTALL_ARCHS),SPARKRT_CUDA_ARCHS=$(INSTALL_ARCHS) )$(PY) -m pip install --quiet --disable-pip-version-check
WHEEL_ARCHS := 80,90a,100a,120a,121a
READY_DEV := .venv/ready-dev-$(KEY)
READY_DOCS := .venv/ready-docs-$(KEY)

.PHONY: help serve test lint format docs kernels build build-report gpu-test wheel bench goldens clean

help:
	@echo "make serve    serve the bundled model on port $(PORT) (ARGS='MODEL --flag ...' for another)"
	@echo "make test     run the tests"
	@echo "make lint     ruff, mypy, import-linter, sizes, clang-format"
	@echo "make format   let ruff and clang-format rewrite the sources"
	@echo "make docs     build the documentation into site/ (ARGS=serve: show it on port 8001, and build again on every change)"
	@echo "make kernels  compile the CUDA kernels in place (SPARKRT_CUDA_ARCHS=80,90a for other GPUs than this machine's)"
	@echo "make gpu-test run the tests that need a GPU"
	@echo "make build    build a wheel, with kernels for this machine's GPU where nvcc is found"
	@echo "make wheel    build a wheel that carries kernels for $(WHEEL_ARCHS) (SPARKRT_CUDA_ARCHS=90a for fewer)"
	@echo "make build-report  list the kernels' registers and spills"
	@echo "make bench    measure tokens per second on this machine"
	@echo "make goldens  write tests/goldens anew with transformers, in an environment of their own"
	@echo "make clean    remove .venv and everything that was built (downloads in .cache stay)"

serve: $(READY)
	@$(PY) -m sparkrt.serve --port $(PORT) $(ARGS)

# real tokenizers, a small real model and a browser are fetched once; where they cannot be had, the tests of them skip and say so.
# Two workers, each with one BLAS thread (tests/conftest.py).
test: $(READY_DEV)
	@$(PY) tools/fetch_inputs.py --optional
	@$(PY) tools/fetch_browser.py
	@$(PY) -m pytest -q -n 2 --dist worksteal $(ARGS)

lint: $(READY_DEV)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@.venv/bin/lint-imports --no-cache
	@$(PY) tools/size.py
	@$(PY) tools/clang_format.py --check

format: $(READY_DEV)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .
	@$(PY) tools/clang_format.py

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(READY_DOCS)
	@.venv/bin/mkdocs $(if $(filter serve,$(ARGS)),serve --dev-addr 127.0.0.1:8001,build --strict)

kernels: $(READY_DEV)
	@$(PY) build_kernels.py

build-report: kernels
	@$(PY) build_kernels.py --report

gpu-test: kernels
	@$(PY) -m pytest -q -n 0 -m gpu $(ARGS) tests/gpu

build: $(READY_DEV)
	@$(PY) -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

# its users need no nvcc; one to three minutes of two cores for each architecture
wheel: export SPARKRT_CUDA_ARCHS := $(or $(SPARKRT_CUDA_ARCHS),$(WHEEL_ARCHS))
wheel: build

bench: $(READY)
	@$(PY) -m benchmarks.kernels $(ARGS)
	@$(PY) -m benchmarks.engine $(ARGS)

goldens:
	@test -x .cache/goldens/bin/python || $(PYTHON) -m venv .cache/goldens
	@.cache/goldens/bin/python -m pip install --quiet -r tools/goldens.txt
	@nice -n 10 .cache/goldens/bin/python -m tools.make_goldens $(ARGS)
	@nice -n 10 .cache/goldens/bin/python -m tools.make_template_goldens

clean:
	rm -rf sparkrt/_lib sparkrt/_kernels*.so .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "sparkrt needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "this Python has no venv module (Debian: apt-get install python3-venv)"; exit 1; }

$(READY): | .venv/bin/python
	@echo "setting up .venv"
	@$(INSTALL) --editable .
	@rm -f .venv/ready-* && touch $@

$(READY_DEV): | .venv/bin/python
	@echo "setting up .venv for development"
	@$(INSTALL) --editable '.[dev]'
	@rm -f .venv/ready-* && touch $(READY) $@

$(READY_DOCS): | .venv/bin/python
	@echo "setting up .venv for the documentation"
	@$(INSTALL) --editable '.[docs]'
	@touch $@
