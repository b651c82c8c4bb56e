# make train   environment, data, a small GPT-2 trained with tensor parallelism
#              STEPS=50: a shorter run; RESUME=1: go on with one that was stopped (else out/quickstart starts anew)
# make test    environment and the whole suite
# make soak    a run killed at 20 random moments and resumed each time (some minutes)

PYTHON ?= python3
BIN := .venv/bin
# the largest tp of 1, 2, 4, 8 that the GPUs allow; two CPU processes where there is none
DEGREE := $(BIN)/python -c "import torch; n = torch.cuda.device_count(); print(max([d for d in (1, 2, 4, 8) if d <= n] or [2]))"

train: .venv/installed
	$(BIN)/python fineweb.py --source stdlib --out data/stdlib
	@tp=$$($(DEGREE)); export OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}; \
	run="$(BIN)/torchrun --standalone --nproc-per-node=$$tp train_gpt2_tp.py configs/quickstart.toml --tp=$$tp \
	$(if $(STEPS),--max_steps=$(STEPS)) $(if $(RESUME),--resume=true)"; \
	echo $$run; $$run
	@echo "next    $(BIN)/python sample.py --checkpoint out/quickstart --prompt 'def __init__(self'"
	@echo "        $(BIN)/python fineweb.py --source fineweb-edu   (or your own text: README.md, Data)"
	@echo "        $(BIN)/torchrun --standalone --nproc-per-node=2 train_gpt2_tp.py configs/gpt2_124m.toml --tp=2"

test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/python -m pytest

soak: .venv/installed-dev
	$(BIN)/python tests/soak.py --kills=20

.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	@echo "installing PyTorch and the rest of requirements.txt into .venv, once: some minutes"
	$(BIN)/pip install -qq --disable-pip-version-check --progress-bar off -r requirements.txt
	touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt
	$(BIN)/pip install -qq --disable-pip-version-check --progress-bar off -r requirements-dev.txt
	touch $@

.PHONY: train test soak
