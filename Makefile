# make demo | test | smoke | test-all | test-gpu | docs | notebooks | address. Needs git, make, Python 3.11 or newer and a package index; nothing else.
# Settings: VENV (the virtual environment's folder), PYTHON (the interpreter that makes it), CUDA (cuda12 or cuda13), PROMPT,
# JOBS (processes that run tests; by default one a core, at most four, as each takes a few GB).

# Where the repository is published: on GitHub, OWNER/NAME. After a change, `make address` writes it into the notebooks.
REPOSITORY = YOUR_ORGANISATION/jaxspec
VENV ?= .venv
CUDA ?= cuda12
PROMPT ?= class Point:
JOBS ?= $(shell cores=$$(nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2); echo $$((cores < 4 ? cores : 4)))
# A file's tests share what they compile, so each file is one process's; tests/conftest.py says which files come first.
PARALLEL = --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder
# A few minutes of tests that need no torch, for other versions of Python and JAX: make smoke VENV=.venv312 PYTHON=python3.12
SMOKE = $(addprefix tests/,decode/test_accept.py model/test_paged_kv.py test_cli.py compile_check/test_compile_check.py test_convert.py test_device.py \
	sampling/test_filters.py test_loading.py test_lowering.py sampling/test_choice.py test_wheel.py kernels/test_add_norm.py kernels/test_qkv.py)
export PROMPT
NEW_ENOUGH = -c 'import sys; sys.exit(sys.version_info < (3, 11))'
# python3 if it will do, else the first versioned one that runs and will do.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	if $$p $(NEW_ENOUGH) 2>/dev/null; then echo $$p; exit; fi; done; echo python3)
BIN = $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Keeps pyright from asking the network whether a newer pyright exists.
export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1

.PHONY: demo test smoke test-all test-gpu lint docs notebooks address
.DELETE_ON_ERROR:  # half a virtual environment is no virtual environment

demo: $(VENV)/.installed
	$(BIN)/jaxspec generate --target pocket --drafter pocket-mtp --temperature 0 --max-tokens 256 --stats --prompt="$$PROMPT"

test: lint
	$(BIN)/python -m pytest $(PARALLEL)

smoke: $(VENV)/.installed-smoke
	$(BIN)/python -m pytest $(SMOKE)

test-all: lint
	$(BIN)/python -m pytest $(PARALLEL) -m 'not gpu'

test-gpu: $(VENV)/.installed-gpu
	JAXSPEC_TEST_PLATFORM=gpu $(BIN)/python -m pytest -m gpu tests/gpu

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo 'Open build/docs/index.html'

notebooks: $(VENV)/.installed-test
	$(BIN)/python notebooks/run.py

address:
	sed -i.old -E 's#(colab\.research\.google\.com/github/|git\+https://github\.com/)[^/]+/[^/"\]+#\1$(REPOSITORY)#' notebooks/*.ipynb
	rm notebooks/*.old

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo --cache-dir .cache/import-linter
	$(BIN)/pyright --pythonpath $(BIN)/python

# Each set-up runs again only when pyproject.toml changes: the package itself is installed in place.
$(VENV)/.installed: EXTRAS =
$(VENV)/.installed-test: EXTRAS = [test]
$(VENV)/.installed-smoke: EXTRAS = [smoke]
$(VENV)/.installed-gpu: EXTRAS = [test,$(CUDA)]
$(VENV)/.installed-docs: EXTRAS = [docs]
$(VENV)/.installed $(VENV)/.installed-test $(VENV)/.installed-smoke $(VENV)/.installed-gpu $(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	@echo 'Installing jaxspec$(EXTRAS) into $(VENV); the first time takes a minute or more.'
	$(PIP_INSTALL) --editable '.$(EXTRAS)'
	@touch $@

$(BIN)/python:
	@$(PYTHON) $(NEW_ENOUGH) || { echo 'jaxspec needs Python 3.11 or newer; $(PYTHON) is' \
		"$$($(PYTHON) --version 2>&1 | head -n 1). Name another: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo '$(PYTHON) -m venv failed;' \
		'on Debian and Ubuntu, install the package python3-venv.' >&2; exit 1; }
