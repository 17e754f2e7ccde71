# `make train` and `make test` on a fresh machine: both make .venv first. PYTHON is what makes it.
PYTHON ?= python3

train: .venv/ready
	.venv/bin/python train.py

test: .venv/ready
	.venv/bin/python -m pytest

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet -r requirements.txt
	touch $@

.PHONY: train test
