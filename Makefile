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

# what README and the model's card show: the model without a cache (model) and all methods (reference); about two hours
# on two cores, and reference-long some eight more; stop it and start it again as you like. Rows that are there are kept,
# whatever machine made them: to measure all anew, make reference-long RESULTS=my/folder
RESULTS := results
METHODS := baseline,fast_dllm,dllm_cache,elastic_cache,acache,wavefilter,wavefilter_tuned,depthweave_kv,depthweave_tuned,dkv_cache,sparse_dllm
NEEDLES := single_1,single_2,multikey_1,multikey_2,multivalue,multiquery
MODEL = $(BIN)/dllm-bench run --out $(RESULTS)/model --method baseline
REFERENCE = $(BIN)/dllm-bench run --out $(RESULTS)/reference --method $(METHODS) --steps 48
FIDELITY = $(BIN)/dllm-bench fidelity --out $(RESULTS)/reference --method $(METHODS) --steps 48 --samples 10
PLOT = $(BIN)/dllm-bench plot $(RESULTS)/reference --task ruler_niah --out $(RESULTS)/reference
REPORTS = $(PLOT)/needles.png --subset single_1,multikey_1,multivalue --ctx 512,1k,4k && \
  $(PLOT)/contexts.png --subset single_1
ifeq ($(patsubst %/,%,$(RESULTS)),results)
REPORTS += && $(BIN)/python scripts/tiny_card.py && $(BIN)/python scripts/readme_tables.py
endif

reference: $(STAMP)
	$(MODEL) --task gsm8k:mini --samples 200
	$(MODEL) --task ruler_niah --subset $(NEEDLES) --ctx 512,1k --samples 200
	$(MODEL) --task longbench:mini --ctx 512,1k --samples 200
	$(REFERENCE) --task gsm8k:mini --samples 30
	$(FIDELITY) --task gsm8k:mini --plot $(RESULTS)/reference/fidelity.png
	$(FIDELITY) --task ruler_niah --subset multikey_1 --ctx 1k --plot $(RESULTS)/reference/fidelity_needles.png
	$(FIDELITY) --task ruler_niah --subset multivalue --ctx 1k --plot $(RESULTS)/reference/fidelity_values.png
	$(REFERENCE) --task ruler_niah --subset $(NEEDLES) --ctx 512,1k --samples 20
	$(REFERENCE) --task longbench:mini --ctx 512,1k --samples 20
	$(REFERENCE) --task ruler_niah --subset single_1,multikey_1,multivalue --ctx 4k --samples 5
	$(REFERENCE) --task ruler_niah --subset single_1 --ctx 16k --samples 2
	$(MODEL) --task gsm8k:mini --samples 200 --steps 48
	$(MODEL) --task gsm8k:mini --samples 200 --steps 12
	$(MODEL) --task ruler_niah --subset $(NEEDLES) --ctx 512 --samples 200 --steps 12
	$(MODEL) --task longbench:mini --ctx 512,1k --samples 200 --steps 8
	$(MODEL) --task ruler_niah --subset single_3,multikey_3 --ctx 512,1k --samples 100
	$(REPORTS)

# the same for the cells that take hours: 4k, 16k and 32k on 200 samples, and by quota at 1k and 4k
reference-long: reference
	$(MODEL) --task longbench:mini --ctx 4k --samples 200
	$(MODEL) --task ruler_niah --subset $(NEEDLES) --ctx 4k --samples 200
	$(MODEL) --task ruler_niah --subset $(NEEDLES) --ctx 1k,4k --samples 200 --steps 12
	$(MODEL) --task longbench:mini --ctx 4k --samples 200 --steps 8
	$(MODEL) --task ruler_niah --subset single_1 --ctx 16k,32k --samples 200
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
