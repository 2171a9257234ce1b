# Two commands set up everything: `make demo` and `make test`. Both need only Python >= 3.11 and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# The CPU build of torch, where pip can see one (see README, "Two commands"); TORCH=torch==2.13.0 takes the default build.
TORCH  ?= $(if $(shell command -v nvidia-smi),torch==2.13.0,torch==2.13.0+cpu)

# Tests of the same kind as those of `make test`, with more seeds, layouts and families; those of everything that computes
# under switches that stand for other machines; ten thousand damaged inputs for each reader of what comes from outside.
# Hours; SWEEP=100 is a taste of the last. A hundred thousand random conversations take half an hour of one core;
# TEMPLATES=folder has real chat templates talk, too (*.jinja, tokenizer_config.json).
SWEEP  ?= 10000
TEMPLATES ?=

# `make golden BASE=<commit>`: a dozen runs by that commit and by the working tree, compared number by number.

# `make test-view`: the viewer's pages in a headless Chromium (Debian: `apt-get install chromium`), with a picture of each in
# build/view. The tests of `make test` have them, too, where there is a browser.

# `make test-peers`: formulas and translations against the peers' own packages, in an environment of their own: network, two
# GB and some minutes. WRITE=--write also writes docs/peers.md.

.PHONY: demo test test-view test-peers sweep golden check format docs bits bench bench-learn bench-train clean

demo: $(VENV)/.installed
	$(BIN)/whet train examples/first_run.yaml

# The suite starts more than a hundred interpreters: compiled modules are kept, whatever the environment says.
test: $(VENV)/.installed-dev
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-view: $(VENV)/.installed-dev
	VIEW_PICTURES=build/view OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser tests/test_view_pages.py

test-peers: .peers-venv/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests .peers-venv/bin/python -m peers.run $(WRITE)

sweep: $(VENV)/.installed-dev
	TEMPLATES="$(TEMPLATES)" OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m sweep --numprocesses 2 --dist loadfile --no-loadscope-reorder
	$(BIN)/python tests/variants.py
	OMP_NUM_THREADS=1 PYTHONPATH=tests nice -n 10 $(BIN)/python -m fuzz.run all $(SWEEP)

golden: $(VENV)/.installed-dev
	$(BIN)/python tests/golden/compare.py $(BASE)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layering.py tests/test_docs.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff format src tests examples benchmarks
	$(BIN)/ruff check --fix src tests examples benchmarks

docs: $(VENV)/.installed-dev
	$(BIN)/python -m whet.config.docs > docs/config.md
	$(BIN)/python -m whet.dialects.docs docs

bits: $(VENV)/.installed
	$(BIN)/python benchmarks/bits.py

bench: $(VENV)/.installed-dev .bench-venv/.installed
	$(BIN)/python benchmarks/bench.py

bench-learn: $(VENV)/.installed-dev .bench-venv/.installed
	$(BIN)/python benchmarks/bench_learn.py

bench-train: $(VENV)/.installed-dev .bench-venv/.installed
	$(BIN)/python benchmarks/train.py

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)" 2>/dev/null || $(PIP) torch==2.13.0
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable ".[dev]"
	touch $@

.bench-venv/.installed: benchmarks/requirements.txt
	test -x .bench-venv/bin/python || $(PYTHON) -m venv .bench-venv
	.bench-venv/bin/python -m pip install --quiet "$(TORCH)" 2>/dev/null || .bench-venv/bin/python -m pip install --quiet torch==2.13.0
	.bench-venv/bin/python -m pip install --quiet --requirement benchmarks/requirements.txt
	touch $@

# The peers come without their dependencies, and so without an engine or CUDA; pip then warns of what they lack.
PEERS := .peers-venv/bin/python -m pip install --quiet
.peers-venv/.installed: tests/peers/requirements.txt tests/peers/imports.txt pyproject.toml constraints.txt
	test -x .peers-venv/bin/python || $(PYTHON) -m venv .peers-venv
	$(PEERS) --constraint constraints.txt "$(TORCH)" 2>/dev/null || $(PEERS) torch==2.13.0
	$(PEERS) --constraint constraints.txt --requirement tests/peers/imports.txt --editable .
	$(PEERS) --no-deps --requirement tests/peers/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) .bench-venv .peers-venv build dist src/*.egg-info
