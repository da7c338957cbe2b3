# `make demo` and `make test` need Python 3.11+ and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

.PHONY: install demo reference test lint format clean

install: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "dllm-bench needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(DEV_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/dllm-bench run --method baseline,fast_dllm --task ruler_niah --ctx 2k --samples 10 --out results/demo
	$(BIN)/dllm-bench leaderboard results/demo

# the leaderboard and the figures that the README shows
REFERENCE := baseline,fast_dllm,dllm_cache,elastic_cache,acache,wavefilter,depthweave_kv
reference: $(STAMP)
	$(BIN)/dllm-bench run --method $(REFERENCE) --task ruler_niah --subset single_1,multikey_1 \
	  --ctx 512,1k,2k,4k --samples 10 --steps 48 --out results/reference
	$(BIN)/dllm-bench plot results/reference --out results/reference/leaderboard.png

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache results/demo
