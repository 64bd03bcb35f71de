# The commands of the README. Each creates .venv if need be; PYTHON chooses the interpreter it is made with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SOURCES := apis post_training providers distributions tests examples benchmarks
# The cases that are measured at other ranks and step sizes too.
SPOTS := ours,torchtune-padded,trl-padded

.PHONY: quickstart test test-faults test-clients bench check docs fix clean

quickstart: $(VENV)/.quickstart
	$(BIN)/python examples/quickstart/quickstart.py

test: check
	$(BIN)/python -m pytest

# The long forms of the tests that kill, fill and cut: about half an hour.
test-faults: $(VENV)/.test
	POSTGRAD_LONG_FAULTS=1 $(BIN)/python -m pytest tests/faults

# Every client of the matrix, each in an environment of its own under ~/.cache/postgrad/clients; prints a table. About ten
# minutes, less once the environments are there. Those for Python 3.12 are skipped where there is none.
test-clients: $(VENV)/.test
	POSTGRAD_ALL_CLIENTS=1 $(BIN)/python -m pytest tests/clients
	POSTGRAD_FUZZ_EXAMPLES=1000 $(BIN)/python -m pytest tests/test_schema_fuzz.py

# Hours, on a machine that does nothing else; what they found goes into docs/performance.md.
bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.training --write
	$(BIN)/python -m benchmarks.training --write --section training-rank-8 --rank 8 --alpha 16 --only $(SPOTS)
	$(BIN)/python -m benchmarks.training --write --section training-rank-64 --rank 64 --alpha 128 --only $(SPOTS)
	$(BIN)/python -m benchmarks.training --write --section training-small-steps --batch 1 --only $(SPOTS)
	$(BIN)/python -m benchmarks.training --write --section training-large-steps --accumulation 6 --steps 10 --only $(SPOTS)
	$(BIN)/python -m benchmarks.limit --write
	$(BIN)/python -m benchmarks.service --write
	$(BIN)/python -m benchmarks.growth --write
	$(BIN)/python -m benchmarks.sessions --write

check: $(VENV)/.test
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/pyright

# The pages that are written from the code.
docs: $(VENV)/.test
	$(BIN)/postgrad stack list-providers --markdown > docs/providers.md

fix: $(VENV)/.test
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit("Postgrad needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	touch $@

# A stamp per extra: make installs again when the pins change.
$(VENV)/.quickstart: pyproject.toml constraints.txt $(VENV)/.made
	$(PIP) --editable '.[quickstart]'
	touch $@

$(VENV)/.bench: pyproject.toml constraints.txt $(VENV)/.made
	$(PIP) --editable '.[bench]'
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt $(VENV)/.made
	$(PIP) --editable '.[test]'
	touch $@ $(VENV)/.quickstart
