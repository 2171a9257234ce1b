# Two commands set up everything: `make demo` and `make test`. Both need only Python >= 3.11 and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# The CPU build of torch, where pip can see one (see docs/install.md); TORCH=torch==2.13.0 takes the default build.
TORCH  ?= $(if $(shell command -v nvidia-smi),torch==2.13.0,torch==2.13.0+cpu)

# Tests of the same kind as those of `make test`, with more seeds, layouts and families; those of everything that computes
# under switches that stand for other machines; ten thousand damaged inputs for each reader of what comes from outside.
# Hours; SWEEP=100 is a taste of the last. A hundred thousand random conversations take half an hour of one core;
# TEMPLATES=folder has real chat templates talk, too (*.jinja, tokenizer_config.json).
SWEEP  ?= 10000
TEMPLATES ?=

# `make test-long`: the tests that take more than 2.5 seconds each, but for those of `make test`, which has one of each
# kind. `make times`: both once, with the seconds that each test takes; writes tests/cases.tsv, which says which those are,
# and how many cases stay of a test that has many. The other cases are in the sweep.

# `make test-stalls`: `make test` on a machine that stands still for four seconds now and then, as a busy virtual one does.

# `make golden BASE=<commit>`: a dozen runs by that commit and by the working tree, compared number by number.

# `make test-view`: the pages of the viewer and the studio in a headless Chromium (Debian: `apt-get install chromium`), with a
# picture of each page and state in build/view, whose names it lists. The tests of `make test` have them, too, where there is
# a browser.

# `make test-peers`: formulas and translations against the peers' own packages, in an environment of their own: network, two
# GB and half an hour. It also reads files of the peers' repositories, which it clones (two GB more) unless REPOSITORIES
# names a folder that has them. WRITE=--write also writes docs/peers.md. `make test-releases`: in the same environment, the
# default document of every release that whet reads, from the package index into the folder RELEASES (else a temporary one).

# `make test-files`: every example file and launch script of the peers' repositories at fixed commits, read as `whet convert`
# does, against tests/peers/files.tsv; minutes. REPOSITORIES=folder has their git directories (owner+name), which are else
# cloned to .peers-git (two GB); SYSTEMS="verl skyrl" are some of them; WRITE=--write writes the table and its counts.

# `make site`: the documentation as web pages in build/site; a link or an anchor that leads nowhere is an error.
# `make check-wheel`: the wheel in a clean environment, from outside the checkout: help, version, a short first run.

# `make test-backends`: the contract suite over a real vLLM, in an environment of its own (network, 3.5 GB, some minutes), or
# over the one that VLLM names; and that of train engines over each stage of DeepSpeed (ten minutes).

# `make check-gpu`: whether whet runs on this machine's NVIDIA GPU, and how fast; ten minutes, a table, check_gpu.json. Where
# the environment is there already, and no network: `python benchmarks/check_gpu.py` with any Python that has torch.

.PHONY: demo test test-long test-stalls times test-view test-peers test-files test-releases test-backends sweep golden check check-gpu \
	check-wheel format docs site bits bench bench-learn bench-train clean

demo: $(VENV)/.installed
	$(BIN)/whet train examples/first_run.yaml

# Three on two cores: tests of clusters and of kills wait for processes more than half of their time.
WORKERS ?= 3
# The suite starts more than a hundred interpreters: compiled modules are kept, whatever the environment says.
PYTEST  := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
AT_ONCE := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed-dev
	$(PYTEST) $(AT_ONCE)

test-long: $(VENV)/.installed-dev
	$(PYTEST) $(AT_ONCE) -m "long and not sweep"

test-stalls: $(VENV)/.installed-dev
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python tests/stalls.py $(BIN)/python -m pytest $(AT_ONCE)

times: $(VENV)/.installed-dev
	rm -rf build/times
	mkdir -p build/times
	WHET_TIMES=build/times PYTHONPATH=tests $(PYTEST) $(AT_ONCE) -p times -m "not sweep"
	$(BIN)/python tests/times.py build/times

test-view: $(VENV)/.installed-dev
	rm -rf build/view
	VIEW_PICTURES=build/view OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser tests/test_view_pages.py tests/test_studio_pages.py
	ls build/view

test-peers: .peers-venv/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests .peers-venv/bin/python -m peers.run $(WRITE)

REPOSITORIES ?= .peers-git
SYSTEMS      ?=

test-files: $(VENV)/.installed-dev
	mkdir -p $(REPOSITORIES)
	REPOSITORIES=$(abspath $(REPOSITORIES)) OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m peers.table_of_files \
		$(SYSTEMS) $(WRITE)

test-releases: .peers-venv/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests .peers-venv/bin/python -m peers.releases $(SYSTEM)

VLLM ?= .vllm-env/bin/vllm

test-backends: $(VENV)/.installed-dev $(VLLM)
	WHET_VLLM="$(VLLM)" OMP_NUM_THREADS=1 $(BIN)/python -m pytest --every-case tests/test_backends.py tests/test_rollout_contract.py -k "vllm or real"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "sweep or not sweep" tests/test_deepspeed.py tests/test_train_contract.py -k "deepspeed or DeepSpeed"

.vllm-env/bin/vllm: $(VENV)/.installed
	$(BIN)/whet engine install vllm --folder .vllm-env

sweep: $(VENV)/.installed-dev
	TEMPLATES="$(TEMPLATES)" $(PYTEST) -m sweep --numprocesses 2 --dist loadfile --no-loadscope-reorder
	$(BIN)/python tests/variants.py
	OMP_NUM_THREADS=1 PYTHONPATH=tests nice -n 10 $(BIN)/python -m fuzz.run all $(SWEEP)

golden: $(VENV)/.installed-dev
	$(BIN)/python tests/golden/compare.py $(BASE)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/python -m pytest --every-case tests/test_layering.py tests/test_docs.py

check-gpu: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/check_gpu.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff format src tests examples benchmarks
	$(BIN)/ruff check --fix src tests examples benchmarks

docs: $(VENV)/.installed-dev
	$(BIN)/python -m whet.config.docs > docs/config.md
	$(BIN)/python -m whet.dialects.docs docs
	$(BIN)/python -m whet.reference docs
	$(BIN)/python tests/test_tutorials.py

site: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check-wheel: $(VENV)/.installed-dev
	rm -rf build/wheel
	$(BIN)/python -m build --outdir build/wheel .
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install --quiet "$(TORCH)" 2>/dev/null || \
		build/wheel/venv/bin/python -m pip install --quiet torch==2.13.0
	build/wheel/venv/bin/python -m pip install --quiet --constraint constraints.txt build/wheel/whet-*.whl
	cp -r examples build/wheel/examples
	cd build/wheel && venv/bin/whet --help > help.txt && venv/bin/python -m whet --version
	cd build/wheel && venv/bin/whet train examples/first_run.yaml stages.sft.train.steps=20 stages.rl.train.steps=5
	cd build/wheel && venv/bin/whet show runs/first_run > show.txt && venv/bin/whet convert examples/from_verl.sh > native.yaml

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
	rm -rf $(VENV) .bench-venv .peers-venv .vllm-env build dist src/*.egg-info
