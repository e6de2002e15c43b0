# Everything goes through .venv, which `make` sets up by itself and refreshes when a file named in SETUP changes.
PYTHON ?= python3
BIN    := .venv/bin
SETUP  := settings.ini setup.py pyproject.toml
# Torch without CUDA (0.4 GB instead of 2.9 GB), from its own index, unless this machine has an NVIDIA card: TORCH=cuda or TORCH=cpu decides.
TORCH  ?= $(if $(shell command -v nvidia-smi),cuda,cpu)
# A target installs the extra that it needs: notebook (build), learn, all (lab), dev (test, test-site, check, docs, export).
INSTALLED := .venv/.installed

# Notebooks of the documentation, which test-site runs; and those of the library, the longest part first. People and papermill run the others.
PAGES   := guides tutorials explanations
LIBRARY := detector dataset extras recordings mel core pages operations cli.ipynb index.ipynb
# Notebooks that need a package which is not installed are left out. That of triton runs in a process of its own: Triton's interpreter has to
# be asked for before anything imports triton, and torch's optimisers do.
LACKS   = $(shell $(BIN)/python -c "import importlib.util as u; print('' if u.find_spec('$1') else 'yes')" 2>/dev/null)
UNMET   = $(call LACKS,triton)
empty :=
PYARROW := export formats tables history predict open_formats
TABLES  = $(if $(call LACKS,pyarrow),|^($(subst $(empty) $(empty),|,$(PYARROW)))\.ipynb)
SKIP    = ^([_.]|out.*\.ipynb|triton_kernel)$(TABLES)
WORKERS ?= 2

# Folders and settings are handed on through the environment as they were typed: blanks and dollars included.
override DATA := $(value DATA)
override OUT  := $(value OUT)
override SETTINGS := $(value SETTINGS)
export DATA OUT SETTINGS

.DEFAULT_GOAL := help
.PHONY: help build learn check test test-site static notebooks house lab docs export clean setup
.PRECIOUS: $(INSTALLED)-%
.SUFFIXES:

help: ## print this list
	@awk -F ': .*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "  make build DATA=folder OUT=folder    your recordings: a folder of splits, or of label folders"
	@echo "  make build SETTINGS=\"sample_rate=4096 duration_s=1 preset=overlap\""
	@echo "                                       any parameter of nbs/build.ipynb; quote values with blanks: table='my list.csv'"
	@echo "  make learn TORCH=cuda                torch with CUDA, also where no NVIDIA card is found"
	@echo "  make test PYTHON=python3.12          another interpreter for a new .venv"

setup: $(INSTALLED)-dev ## set up .venv with all that tests and documentation need

$(INSTALLED)-%: $(SETUP)
	@command -v "$(PYTHON)" >/dev/null || { echo "make: $(PYTHON) was not found. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is $$("$(PYTHON)" -V 2>&1); Python 3.11 or newer is needed. Name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) cannot make virtual environments: its venv module is missing. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python -c 'import pip' 2>/dev/null || { echo "setting up .venv" && "$(PYTHON)" -m venv --clear .venv; }
	@$(BIN)/python nbs/_tools/install.py "$(TORCH)" $* || { echo "make: the installation did not finish; the cause is printed above. It needs the package index once; run the same command again to continue" >&2; exit 1; }
	@touch $@ $(foreach part,$(INCLUDED_$*),$(INSTALLED)-$(part))

# extras that another one installs too
INCLUDED_all := notebook learn
INCLUDED_dev := all notebook learn

build: $(INSTALLED)-notebook ## build verified data sets, from DATA or a made demo set, into OUT or a new folder below runs/
	@$(BIN)/python nbs/_tools/run_build.py

learn: $(INSTALLED)-learn ## install what detectors need: torch and scikit-learn
	@$(if $(filter command,$(origin TORCH)),$(BIN)/python nbs/_tools/install.py "$(TORCH)" learn)
	@echo "next: $(BIN)/leakmel train FOLDER --out detector"

# One thread of torch for a worker: threads of several workers that wait for each other take a few cores twice as long.
test: export OMP_NUM_THREADS := 1
test: $(INSTALLED)-dev ## check that notebooks and package agree; run library notebooks, ruff, mypy and pytest without what test-site runs
	@$(MAKE) --no-print-directory -j 2 static notebooks
	$(BIN)/python -m pytest -m 'not long and not site and not slow' -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# What a change of the package seldom breaks, marked `site`, and what takes long, marked `slow`.
test-site: export OMP_NUM_THREADS := 1
test-site: $(INSTALLED)-dev ## guides, and slow cells of notebooks; slow tests; installation, documentation, pages in a browser, benchmarks
	@grep -lr --include='*.ipynb' '"#| slow' $(LIBRARY:%=nbs/%) | xargs -P $(WORKERS) -n 1 $(BIN)/nbdev_test --flags slow --path
	@printf 'nbs/%s\n' $(PAGES) | xargs -n 1 $(BIN)/nbdev_test --n_workers $(WORKERS) --skip_file_re '$(SKIP)' --path
	$(BIN)/python -m pytest -m '(site or slow) and not long' -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Two parts of `make test`, side by side: much of them keeps one core busy.
static:
	$(BIN)/ruff format --check nbs tests setup.py
	$(BIN)/ruff check leakmel tests nbs/_tools nbs/benchmarks/*.py
	$(BIN)/ruff check --select I nbs
	$(BIN)/python nbs/_tools/sync.py --check
	$(BIN)/mypy

notebooks:
	@[ -z '$(UNMET)' ] || echo "not run, for want of triton: nbs/mel/triton_kernel.ipynb ($(BIN)/pip install -e '.[gpu]' brings it)"
	@[ -z '$(TABLES)' ] || echo "not run, for want of pyarrow: $(PYARROW) ($(BIN)/pip install -e '.[formats]' brings it)"
	@printf 'nbs/%s\n' $(LIBRARY) $(if $(UNMET),,mel/triton_kernel.ipynb) | xargs -P $(WORKERS) -n 1 $(BIN)/nbdev_test --n_workers 1 --skip_file_re '$(SKIP)' --path

# The edit loop: what finds most mistakes in little time. Its tests are in files marked `quick`, and not marked `slow`.
check: export OMP_NUM_THREADS := 1
check: $(INSTALLED)-dev ## the edit loop: format, lint, types, notebooks against package, quick tests
	@$(BIN)/python nbs/_tools/check.py --workers $(WORKERS)

house: $(INSTALLED)-dev ## print the figures of structure and language; SINCE=commit compares the structure
	@$(BIN)/python nbs/_tools/house.py $(if $(SINCE),--since "$(SINCE)")
	@$(BIN)/python nbs/_tools/prose.py

lab: $(INSTALLED)-all ## open JupyterLab on this machine, in a folder of run notebooks: runs/lab
	@$(BIN)/leakmel init runs/lab
	cd runs/lab && ../../$(BIN)/jupyter-lab --ip=127.0.0.1 --LabApp.app_settings_dir=../../leakmel/lab $(if $(filter 0,$(shell id -u)),--allow-root)

docs: $(INSTALLED)-dev ## build the site into _docs/, without a network
	@$(BIN)/python nbs/_tools/prepare.py
	@$(BIN)/python -m sphinx -q -W --keep-going -j auto -b html -c nbs/_tools _docs/source _docs/html
	@echo "open _docs/html/index.html"

export: $(INSTALLED)-dev ## after editing notebooks: write package and README.md, store what changed notebooks show; OUTPUTS=all
	@$(BIN)/python nbs/_tools/sync.py

clean: ## remove .venv, caches and the site; runs/ stays
	rm -rf .venv _docs build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find leakmel tests nbs -name __pycache__ -type d -prune -exec rm -rf {} +
