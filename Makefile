# make demo, make serve, make test: each makes .venv first and needs nothing but Python and make.
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
# Without a GPU, torch comes from here: the default build brings CUDA, 2.8 GB more. Empty: it does not.
TORCH_INDEX ?= $(if $(strip $(PIP_ARGS)),,https://download.pytorch.org/whl/cpu)
export FUZZ_EXAMPLES ?= 20000
SOAK_SECONDS ?= 1200
WORKERS ?= 3
GPU_PYTHON ?= 3.12
GPU_ARGS ?=
BIN := $(VENV)/bin
GPU_RUN = PYTHONPATH=$(CURDIR):$(CURDIR)/src:$(CURDIR)/tests:$(CURDIR)/examples gpu-site.venv/bin/python3 -m

# Where it is set, each of the thousands of processes that tests start would compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo serve test test-page test-deploy aoti gpu gpu-site docs fuzz soak release budget lint types clean

define INSTALL
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is missing or older than 3.10. Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || \
		{ echo "$(PYTHON) cannot make virtual environments. Install python3-venv, or name another one:" \
			"make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "Installing into $(VENV) with $$($(PYTHON) --version), which takes some minutes ..."
	$(PYTHON) -m venv $(VENV)
	@if [ -n "$(TORCH_INDEX)" ] && ! command -v nvidia-smi > /dev/null && ! [ -e /dev/nvidiactl ] && \
		! $(BIN)/python -m pip config list | grep index > /dev/null; then \
		echo "No GPU: installing a CPU build of torch. PIP_ARGS=\"--index-url https://pypi.org/simple\" chooses the default one."; \
		$(BIN)/python -m pip install --retries 1 --no-deps --index-url $(TORCH_INDEX) --constraint constraints.txt torch || \
			echo "No torch from $(TORCH_INDEX): installing the default build."; \
	fi
	$(BIN)/python -m pip install $(PIP_ARGS) --constraint constraints.txt --editable
endef

# What the demo needs; the tests install the rest.
$(VENV)/demo: pyproject.toml constraints.txt
	$(INSTALL) '.[demo]'
	touch $@

$(VENV)/installed: pyproject.toml constraints.txt
	$(INSTALL) '.[dev]'
	touch $(VENV)/demo $@

demo: $(VENV)/demo
	$(BIN)/python examples/demo.py

serve: $(VENV)/demo
	$(BIN)/torch-py-backend serve examples/model_repository

# The package: unit tests, and real servers. tests/conftest.py distributes files over the processes.
test: lint types
	$(BIN)/pytest --numprocesses $(WORKERS) --no-loadscope-reorder --ignore tests/deploy

# The page in a real browser, Debian's chromium.
test-page: $(VENV)/installed
	$(BIN)/pytest -n0 tests/page

# What surrounds the package: documentation, images, manifests, monitoring and the release.
test-deploy: $(VENV)/installed
	$(BIN)/pytest --numprocesses $(WORKERS) tests/deploy

# The scenarios of the tests with OPTIMIZE "aoti": the same answers, or a load that fails with the reason.
aoti: $(VENV)/installed
	SCENARIO_OPTIMIZE=aoti $(BIN)/pytest --numprocesses $(WORKERS) -rs tests/test_scenarios.py

# The tests for a GPU, then the throughput beside a model by hand, on a machine with torch and pytest and
# perhaps without a network: make gpu-site beforehand, and take the archive there. Not with the settings of
# pyproject.toml, which need plugins.
gpu:
	if [ -f gpu-site-$(GPU_PYTHON).tar.xz ]; then mkdir -p gpu-site && tar -xJf gpu-site-$(GPU_PYTHON).tar.xz -C gpu-site; fi
	$(PYTHON) -m venv --clear --without-pip gpu-site.venv
	$(PYTHON) -c 'import site; print("$(CURDIR)/gpu-site", *site.getsitepackages(), sep="\n")' \
		> $$(echo gpu-site.venv/lib/python3*/site-packages)/gpu-site.pth
	$(GPU_RUN) pytest -c /dev/null --rootdir . --confcutdir tests/gpu --import-mode=importlib \
		-p no:cacheprovider $(GPU_ARGS) tests/gpu
	$(GPU_RUN) benchmarks.serving --device cuda --against floor,plain --seconds 1 --pairs 3

# What that machine may lack, a tritonserver among it, for the version of its Python.
gpu-site: $(VENV)/installed
	$(BIN)/python -m benchmarks.gpu_site --python $(GPU_PYTHON)

# The documentation as a site, in site/; a page, link or heading that is missing is an error.
docs: $(VENV)/installed
	$(BIN)/mkdocs build --strict

# Every parser of what others wrote, with other bytes in every run; FUZZ_EXAMPLES is how many each.
fuzz: $(VENV)/installed
	$(BIN)/pytest -n0 --timeout=0 --hypothesis-profile=fuzz tests/test_fuzzing.py

# A real server under full load for twenty minutes, with loads, unloads and cancellations.
soak: $(VENV)/installed
	SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/pytest tests/live/faults/test_soak.py -s --timeout 7200

# Wheel and sdist in dist/, checked as a package index would, and installed by the tests.
release: $(VENV)/installed
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/pytest tests/deploy/test_release.py

lint: $(VENV)/installed budget
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_pages.py

# The size of the project beside its limits.
budget: $(VENV)/installed
	$(BIN)/python scripts/budget.py

types: $(VENV)/installed
	$(BIN)/mypy

clean:
	rm -rf $(VENV)
