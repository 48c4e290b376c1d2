# Every target sets up what it needs in .venv, once, and again when pyproject.toml or constraints.txt change.
# Variables: PYTHON (3.11 or newer, for a new .venv), PROCESSES (of pytest), ARGS (handed to the command).

PYTHON    ?= python3
PROCESSES ?= 2
ARGS      ?=

VENV    := .venv
BIN     := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --constraint constraints.txt --no-build-isolation
PYTEST  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PROCESSES)

# Tests of Triton's kernels run in its interpreter, which a process takes for good: a run of their own. Files and test
# ids in ARGS go to the run that they belong to; the rest may select nothing there, which pytest says by exit code 5.
KERNELS := $(shell grep -l '^require_triton()' tests/test_triton_*.py)
FILES   := $(filter tests/%,$(ARGS))
INTERPRETED := $(if $(FILES),$(filter $(addsuffix %,$(KERNELS)),$(FILES)),$(KERNELS))
OTHERS  := $(filter-out $(INTERPRETED),$(FILES))
EMPTY   := $(if $(ARGS),|| [ $$$$? -eq 5 ])

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help compare test lint bench aot tutorials docs docs-serve site-test clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

compare: $(VENV)/.core  ## set up, then replay a request trace through the tiers and the oracle (ARGS="--requests 8")
	$(BIN)/mla compare $(ARGS)

test: $(VENV)/.test  ## set up, then run the whole CPU suite, and Triton's kernels interpreted (ARGS="-k merge")
	$(if $(FILES),$(if $(OTHERS),$(PYTEST) $(filter-out $(INTERPRETED),$(ARGS)) $(EMPTY)),$(PYTEST) $(ARGS) $(EMPTY))
	$(if $(INTERPRETED),TRITON_INTERPRET=1 $(PYTEST) $(filter-out tests/%,$(ARGS)) $(INTERPRETED) $(EMPTY))

lint: $(VENV)/.lint  ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.test  ## time the CPU tiers (ARGS="paged --batch 4q1s4k")
	$(BIN)/mla bench $(ARGS)

aot: $(VENV)/.test  ## compile all Triton kernels with no GPU, hold them to budgets, write the table (ARGS="--all")
	$(BIN)/python -m tiers.tier2_triton.aot_table $(ARGS)

tutorials: $(VENV)/.tutorials $(VENV)/.test  ## run every notebook twice: as a reader meets it, and with the solutions
	MLA_TUTORIALS=1 $(PYTEST) tests/test_tutorials.py $(ARGS)

docs: $(VENV)/.docs  ## build the site into site/, generated pages included
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.docs  ## build the site and serve it on this machine
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

site-test: $(VENV)/.docs $(VENV)/.site $(VENV)/.test  ## open every page in Chromium (apt-get install chromium)
	MLA_SITE=1 $(BIN)/python -m pytest tests/test_site.py tests/test_explorables.py $(ARGS)

clean:  ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find mla tiers tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written last, so a set-up that was interrupted is done again. Without --no-build-isolation pip would
# fetch an unpinned setuptools for each install.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.core: pyproject.toml constraints.txt | $(VENV)/.created
	$(BIN)/python -m pip install --constraint constraints.txt setuptools
	$(INSTALL) --editable .
	@touch $@

# Triton 3.6 belongs to the PyTorch that the GPU records were made with. The Hopper kernels are compiled by it as well.
OTHER_TRITON := 3.6.0
ifeq ($(shell uname -s),Linux)
$(VENV)/.test: | $(VENV)/triton-$(OTHER_TRITON)
endif

$(VENV)/triton-$(OTHER_TRITON): | $(VENV)/.created
	@rm -rf $@.part
	$(BIN)/python -m pip install --no-deps --target $@.part triton==$(OTHER_TRITON)
	@mv $@.part $@

$(VENV)/.test $(VENV)/.lint $(VENV)/.docs $(VENV)/.tutorials $(VENV)/.site: $(VENV)/.%: $(VENV)/.core
	$(INSTALL) --editable '.[$*]'
	@touch $@
