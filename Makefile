PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test check

# The main job. Overrides go in ARGS: make train ARGS="optim.lr=1e-4 trainer.experiment_name=b"
train: .venv/installed
	$(BIN)/python scripts/train.py $(ARGS)

# The whole suite. Options of pytest go in ARGS: make test ARGS="-k resume"
test: .venv/installed
	$(BIN)/python -m pytest $(ARGS)

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[sft,hdfs,s3,sweep,dev]'
	touch $@
