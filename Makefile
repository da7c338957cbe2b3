# `make demo` and `make test` need Python 3.11+ and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

.PHONY: install demo reference reference-long test lint format clean

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

# what README and the model's card show: the model without a cache (results/model) and all methods (results/reference);
# about two hours on two cores; stop it and start it again as you like
METHODS := baseline,fast_dllm,dllm_cache,elastic_cache,acache,wavefilter,wavefilter_tuned,depthweave_kv,depthweave_tuned,dkv_cache,sparse_dllm
NEEDLES := single_1,single_2,multikey_1,multikey_2,multivalue,multiquery
MODEL := $(BIN)/dllm-bench run --out results/model --method baseline
REFERENCE := $(BIN)/dllm-bench run --out results/reference --method $(METHODS) --steps 48
FIDELITY := $(BIN)/dllm-bench fidelity --out results/reference --method $(METHODS) --steps 48 --samples 10
REPORTS = $(BIN)/dllm-bench plot results/reference --out results/reference/leaderboard.png && \
  $(BIN)/python scripts/tiny_card.py && $(BIN)/python scripts/readme_tables.py

reference: $(STAMP)
	$(MODEL) --task gsm8k:mini --samples 200
	$(MODEL) --task ruler_niah --subset $(NEEDLES) --ctx 512,1k --samples 200
	$(MODEL) --task longbench:mini --ctx 512,1k --samples 200
	$(REFERENCE) --task gsm8k:mini --samples 30
	$(FIDELITY) --task gsm8k:mini --plot results/reference/fidelity.png
	$(FIDELITY) --task ruler_niah --subset multikey_1 --ctx 1k --plot results/reference/fidelity_needles.png
	$(FIDELITY) --task ruler_niah --subset multivalue --ctx 1k --plot results/reference/fidelity_values.png
	$(REFERENCE) --task ruler_niah --subset single_1,multikey_1,multivalue --ctx 512,1k --samples 20
	$(REFERENCE) --task ruler_niah --subset single_1,multikey_1,multivalue --ctx 4k --samples 2
	$(MODEL) --task gsm8k:mini --samples 200 --steps 48
	$(MODEL) --task gsm8k:mini --samples 200 --steps 12
	$(MODEL) --task ruler_niah --subset $(NEEDLES) --ctx 512 --samples 200 --steps 12
	$(MODEL) --task longbench:mini --ctx 512,1k --samples 200 --steps 8
	$(MODEL) --task ruler_niah --subset single_3,multikey_3 --ctx 512,1k --samples 100
	$(MODEL) --task ruler_niah --subset single_1 --ctx 16k,32k --samples 10
	$(MODEL) --task longbench:mini --ctx 4k --samples 200
	$(MODEL) --task ruler_niah --subset single_1,single_2,multikey_1,multikey_2 --ctx 4k --samples 200
	$(REPORTS)

# the same for the cells that take hours: several values and queries at 4k, quota at 1k and 4k, 16k and 32k
reference-long: reference
	$(MODEL) --task ruler_niah --subset multivalue,multiquery --ctx 4k --samples 200
	$(MODEL) --task ruler_niah --subset $(NEEDLES) --ctx 1k,4k --samples 200 --steps 12
	$(MODEL) --task longbench:mini --ctx 4k --samples 200 --steps 8
	$(MODEL) --task ruler_niah --subset single_1 --ctx 16k --samples 200
	$(REFERENCE) --task ruler_niah --subset single_1 --ctx 16k --samples 2
	$(MODEL) --task ruler_niah --subset single_1 --ctx 32k --samples 200
	$(REPORTS)

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
