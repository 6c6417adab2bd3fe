# Set-up and the jobs of a developer. Everything lives in .venv and in the model cache ($ZRT_HOME, default ~/.cache/zrt).

PYTHON ?= python3
BIN := .venv/bin
RESULTS := $(CURDIR)/chaos.jsonl
WORKERS := 2
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test gpu-test lint docs chaos bench dev clean

## ask the demo model one question through two block servers, end to end
demo: .venv/demo
	$(BIN)/zrt up conf/local.toml --prompt "What is the capital of France?"

## the whole suite, WORKERS files of it at once, then lint, format, types and docs
test: .venv/test dev
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not chaos" -n $(WORKERS) --dist loadfile --no-loadscope-reorder
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory docs

## what needs a CUDA device, with whatever Python there has torch for it
gpu-test: dev
	PYTHONPATH=.dev HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(PYTHON) -m pytest tests/gpu

lint: .venv/test dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p zrt.runtime -p zrt.actors -p zrt.tui -p support
	PYTHONPATH=.dev $(BIN)/lint-imports
	$(BIN)/vulture

## the site of docs/, into build/docs, without the network; a dead link fails
docs: .venv/docs
	$(BIN)/zensical build --strict --clean

## the full fault matrices (long)
chaos: .venv/test
	@rm -f $(RESULTS)
	@echo "results, one JSON object a line: $(RESULTS)"
	ZRT_RESULTS=$(RESULTS) HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m "chaos or matrix"

## the published figures, one JSON object each
bench: .venv/test
	$(BIN)/python bench/pipeline.py --stages 1
	$(BIN)/python bench/pipeline.py --stages 2
	$(BIN)/python bench/sessions.py batch
	$(BIN)/python bench/sessions.py cut --stages 2 --sessions 1
	$(BIN)/python bench/sessions.py cut --stages 2
	$(BIN)/python bench/sessions.py arrival
	$(BIN)/python bench/sessions.py fairness
	$(BIN)/python bench/sessions.py memory
	$(BIN)/python bench/layers.py hop
	$(BIN)/python bench/layers.py push
	$(BIN)/python bench/idle.py

## lets editors and type checkers resolve the folders under their import name
dev:
	@mkdir -p .dev/zrt
	@for room in runtime actors tui conf; do ln -sfn ../../$$room .dev/zrt/$$room; done

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[demo]'
	@touch $@

.venv/test: .venv/demo
	$(PIP) --editable '.[test]'
	@touch $@

.venv/docs: .venv/test
	$(PIP) --editable '.[docs]'
	@touch $@

clean:
	rm -rf .venv .dev .cache build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
