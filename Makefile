# Two commands do all the set-up: `make demo` and `make test`. Everything lives in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TESTS := $(VENV)/.installed-dev
FRAMEWORKS := $(VENV)/.installed-frameworks

PIP := $(BIN)/pip install --quiet --disable-pip-version-check
# LOCKED=yes: exactly the packages of uv.lock, each checked by its hash. Otherwise what the index has, within the bounds.
LOCKED ?=
# The lock names PyPI only, whatever index this machine uses.
UV := $(BIN)/uv --no-config
UV_INDEX := env -u UV_INDEX -u UV_EXTRA_INDEX_URL -u UV_FIND_LINKS UV_DEFAULT_INDEX=https://pypi.org/simple

# All that ucxx needs on a CPU: what else its wheels ask for is for GPUs, and large.
UCXX := ucxx-cu12==0.52.0 libucxx-cu12==0.52.0 libucx-cu12==1.21.0 librmm-cu12==26.10.0

# For its fault injector. Alone: it asks for pynvml, which costs each start of any Python program 50 ms. No wheels for
# Python 3.13 and later ones.
NVRX := nvidia-resiliency-ext==0.4.1

# Without bytecode each process that a test starts would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help deps lock lock-check sbom dist demo test test-torch ci-slurm ci-simulate ci-soak ci-mutants ci-mutants-generated corpus fuzz slurm-packages browser prometheus ucxx fmt lint type docs bench clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nvrx-slurm needs Python 3.11 or newer; name one: make PYTHON=python3.12 …")'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV) || { echo "no venv module: sudo apt-get install -y python3-venv"; exit 2; }
	$(if $(LOCKED),$(call install_locked,--extra ci),$(PIP) --editable '.[ci]')
	touch $@

$(TESTS): $(INSTALLED)
	$(if $(LOCKED),$(call install_locked,--extra dev),$(PIP) --editable '.[dev]')
	touch $@

$(FRAMEWORKS): $(TESTS)
	$(PIP) --editable '.[frameworks]'
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 13))' || $(PIP) --no-deps $(NVRX)
	touch $@

# pip, not uv, installs: it refuses a requirement without a hash. hatchling builds the editable install, and is locked.
define install_locked
$(PIP) --require-hashes -r ci/tools.txt
	$(UV) export --quiet --frozen $(1) --no-emit-project --no-header --output-file $(VENV)/locked.txt
	$(PIP) --require-hashes -r $(VENV)/locked.txt
	$(PIP) --no-deps --no-build-isolation --editable .
endef

$(BIN)/uv: | $(INSTALLED)
	$(PIP) --require-hashes -r ci/tools.txt

lock: $(BIN)/uv  ## Write uv.lock and ci/tools.txt, with the newest versions within the bounds of pyproject.toml
	$(UV_INDEX) $(UV) lock --upgrade
	$(UV) export --quiet --frozen --only-group tools --no-emit-project --no-header --output-file ci/tools.txt

lock-check: $(BIN)/uv
	$(UV_INDEX) $(UV) lock --check
	$(UV) export --quiet --frozen --only-group tools --no-emit-project --no-header | diff ci/tools.txt -

dist: $(BIN)/uv  ## Build sdist and wheel reproducibly and check their contents
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m ci.dist dist

sbom: $(BIN)/uv  ## Write dist/nvrx-slurm.cdx.json (CycloneDX): the locked packages of the core, attribution and ci
	mkdir -p dist
	$(UV) export --quiet --frozen --extra attribution --extra ci --no-emit-project --no-header --output-file $(VENV)/sbom.txt
	$(BIN)/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible --of JSON -o dist/nvrx-slurm.cdx.json $(VENV)/sbom.txt

deps: $(FRAMEWORKS) slurm-packages browser prometheus ucxx  ## Install all that the tests need, torch too

demo: $(INSTALLED)  ## Train on 4 local nodes with 2 hot spares, kill one node midway, compare the result
	$(BIN)/nvrx-slurm demo

test: $(TESTS) slurm-packages browser prometheus ucxx  ## Run all tests, the ones on a real Slurm included
	$(BIN)/pytest -n 6 --dist worksteal -m 'not torch' $(ARGS)

test-torch: $(FRAMEWORKS)  ## Run the tests that need torch, transformers, accelerate and Lightning (CPU is enough)
	$(BIN)/pytest -m torch $(ARGS)

fuzz: $(TESTS)  ## Feed a million invalid inputs to each decoder of external data
	$(BIN)/python -m ci.fuzz $(ARGS)

ci-simulate: $(INSTALLED)  ## Simulate 2,000 seeded runs with faults in virtual time
	$(BIN)/nvrx-slurm ci simulate --seeds 2000 --jobs 2 $(ARGS)

ci-soak: $(TESTS)  ## Run all simulations for MINUTES=60 on all cores; the control plane's is guided by coverage
	$(BIN)/python -m ci.soak --minutes $(or $(MINUTES),60) $(ARGS)

corpus: $(TESTS)  ## Measure the failure analysis on the labelled failures of tests/corpus
	$(BIN)/python -m ci.corpus $(ARGS)

ci-mutants: $(TESTS)  ## Insert defects into the product: unit tests or the simulation must detect each
	$(BIN)/python -m ci.mutants $(ARGS)

ci-mutants-generated: $(TESTS)  ## Let mutmut change each expression of the pure modules: unit tests must detect 95 %
	$(BIN)/python -c 'import mutmut' 2>/dev/null || $(PIP) 'mutmut==3.8.1'
	$(BIN)/python -m ci.mutants.generated $(ARGS)

ci-slurm: $(TESTS)  ## Run the flows of ci/flows on the site's Slurm, otherwise on one of their own; SLURM=debian:sid: on Debian's
ifdef SLURM
	$(if $(LOCKED),$(UV) export --quiet --frozen --extra attribution --extra ci --group flows --no-emit-project --no-header --output-file $(VENV)/flows.txt)
	exec $(BIN)/python -m ci.debian_root $(SLURM) $(if $(LOCKED),--requirements $(VENV)/flows.txt) -- \
	  nvrx-slurm ci run ci/flows --on dev --jobs 3 $(ARGS)
else
	command -v sbatch >/dev/null || $(BIN)/python -m ci.programs slurm
	$(BIN)/nvrx-slurm ci run ci/flows --jobs 3 $(ARGS)
endif

slurm-packages: $(TESTS)
	$(BIN)/python -m ci.programs slurm

browser: $(TESTS)
	$(BIN)/python -m ci.programs browser

prometheus: $(TESTS)
	$(BIN)/python -m ci.programs prometheus

ucxx: $(TESTS)
	$(BIN)/python -c 'import ucxx' 2>/dev/null || $(PIP) --no-deps $(UCXX)

fmt: $(TESTS)  ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(TESTS)  ## Check style, layers and the workflows of GitHub Actions; measure how the code reads
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	PATH="$(CURDIR)/$(BIN):$$PATH" actionlint -config-file .github/actionlint.yaml .github/workflows/*.yml
	@$(BIN)/python -m ci.house

type: $(TESTS)  ## Check types
	$(BIN)/mypy

docs: $(TESTS) slurm-packages browser  ## Write the generated parts of docs/, record docs/demo.svg on a real Slurm, draw docs/report.png
	$(BIN)/python -m ci.pages
	$(BIN)/python -m ci.recording docs/demo.svg
	$(BIN)/python -m ci.report_picture docs/report.png

bench: $(TESTS)  ## Run the benchmarks, each beside a peer in the same run
	$(BIN)/python -m bench $(ARGS)

clean:  ## Remove the outputs of the other targets
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
