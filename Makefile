# make demo and make test do all the set-up on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Bytecode is compiled when a module is imported: most installed modules never are.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile --constraint constraints.txt
# Some virtual machines advertise AMX without allowing it: bf16 products would end in SIGILL.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.PHONY: demo test test-quick check bench theory evidence docs format wheel lock clean

# The virtual environment without packages. Every error here is one line that says what to do.
$(BIN)/python:
	@command -v '$(PYTHON)' > /dev/null || { \
		echo "$(PYTHON) not found: install Python 3.11 or later, or name one: make PYTHON=python3.12"; \
		exit 1; } >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), and 3.11 or later is needed; name one: make PYTHON=python3.12"; \
		exit 1; } >&2
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { \
		echo "$(PYTHON) cannot create virtual environments: install its venv package (Debian, Ubuntu: apt install python3-venv)"; \
		exit 1; } >&2
	@echo "Creating $(VENV) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv $(VENV)

# What the demo imports. A complete installation (.installed) covers it.
$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing torch into $(VENV) (190 MB as a CPU build, several times that with CUDA) ..."
	@$(PIP) --quiet torch
	@echo "Installing what the demo needs in addition: matplotlib, numpy and a few small packages ..."
	@$(PIP) --quiet --editable '.[demo]'
	@touch $@

# Everything: the tools, and every framework that has an integration.
$(VENV)/.installed: pyproject.toml constraints.txt hosts.txt | $(BIN)/python
	@echo "Installing the development environment into $(VENV): about 180 packages, a few minutes ..."
	@$(PIP) --quiet --upgrade pip  # a new pip resolves in less than half the time
	@$(PIP) --quiet --editable '.[dev]'
	@$(PIP) --quiet --no-deps --requirement hosts.txt
	@touch $(VENV)/.demo $@

# One thread each: these matrices are too small for more, and waiting threads spin.
demo test test-quick theory: export OMP_NUM_THREADS ?= 1

demo: $(VENV)/.demo
	@echo "Starting the demo; the first lines of training follow in a few seconds ..."
	@$(BIN)/angular-lab demo --out demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The library without its slow tests, and runs of the lab's trainer.
test-quick: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow and not fuzz' --durations 5 \
		tests/library tests/lab/training/test_train.py

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/step_time.py

theory: $(VENV)/.installed
	$(BIN)/angular-lab theory --results results/theory --out build/theory
	mkdir -p docs/figures/theory
	cp build/theory/figures/*.svg docs/figures/theory/

# What README.md and docs/ quote of the kept results: results/facts.json, marked numbers, figures.
evidence: $(VENV)/.installed
	$(BIN)/python -m evidence

# The documentation site, in build/site/. A warning is an error; --quiet would hide it from --strict.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel: $(VENV)/.installed
	$(BIN)/python -m build --no-isolation --outdir dist

# Rewrite constraints.txt with the newest versions that pyproject.toml allows. Run the tests after.
lock: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --requirement hosts.txt
	sed -i '/^[^#]/d' constraints.txt
	$(BIN)/python -m pip freeze --exclude-editable > $(VENV)/freeze
	sed -E '/@/d; s/\+(cpu|cu[0-9]+)$$//' $(VENV)/freeze >> constraints.txt
	touch $(VENV)/.demo $(VENV)/.installed

clean:
	rm -rf $(VENV) demo
