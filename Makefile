# make demo and make test do all the set-up on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Some virtual machines advertise AMX without allowing it: bf16 products would end in SIGILL.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.PHONY: demo test test-quick check bench theory evidence docs format clean

$(VENV)/.installed: pyproject.toml constraints.txt hosts.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --requirement hosts.txt
	touch $@

# One thread each: these matrices are too small for more, and waiting threads spin.
demo test test-quick theory: export OMP_NUM_THREADS ?= 1

demo: $(VENV)/.installed
	$(BIN)/angular-lab demo --out demo

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

# The documentation site, in build/site/. A warning is an error.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) demo
