# make demo      set up, then show on real models what a horizon does to the gradient, to memory and to training
# make test      set up, then run the tests (make test-all: the slow ones too)
# make soak      set up, then strike random jobs for 20 minutes and let two train for long: MINUTES=5 SEED=1 make soak
# make mutants   set up, then plant faults one at a time and see which the tests miss: NUM=300 SEED=0 make mutants
# make reproduce set up, then every experiment of docs/paper at a small size (make data first: some need real data)
# make gpu-check set up, then check on two GPUs what has only been run on CPUs, and write a page: runs/gpu-check/report.md
# make check     set up, then lint, formatting and strict types

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# One thread per process: the tensors are small, and processes side by side must not fight for the cores.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all soak mutants data reproduce gpu-check check format clean
.DEFAULT_GOAL := test

# Rebuilt only when what is installed changes, and from nothing if a set-up was interrupted; otherwise the targets below
# do no install work.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("mpc_dist needs Python 3.10 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(if $(wildcard $(READY)),,--clear) $(VENV)
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/mpc-dist angles --config configs/res_mlp.yaml --out runs/demo/res_mlp
	$(BIN)/mpc-dist angles --config configs/gpt_stdlib.yaml --out runs/demo/gpt
	$(BIN)/mpc-dist plan --config configs/gpt_train.yaml --gpu-memory 40MiB --max-gpus 2 --out runs/demo/plan.yaml
	$(BIN)/mpc-dist demo --config configs/gpt_train.yaml --out runs/demo/train
	$(BIN)/mpc-dist report runs/demo/train/horizon1 runs/demo/train/backprop --out runs/demo/report.html
	@echo
	@echo "Pictures in runs/demo: res_mlp/angles.png, gpt/angles.png, plan.png and train/timelines.png; open report.html"

# Two test files at a time: ranks spend much of their time waiting for each other.
test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow'

test-all: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

MINUTES ?= 20
SEED ?= 0
soak: $(READY)
	$(BIN)/python -m tests.reliability.soak --minutes $(MINUTES) --seed $(SEED)

# Goes on where it was interrupted; docs/mutants.md lists what no test saw, and fails while one has no reason.
NUM ?= 300
mutants: $(READY)
	$(BIN)/python -m tests.mutants --number $(NUM) --seed $(SEED)

# CIFAR-10/100, text and a trained ResNet-56 into data/, from a folder that has them (see docs/paper/README.md).
DATA ?= $(or $(MPC_DIST_DATA),../shared/data)
data: $(READY)
	@test -d '$(DATA)' || { echo "no real data in $(DATA): set DATA=FOLDER, or fill data/ as docs/paper/README.md says"; exit 1; }
	$(BIN)/python '$(DATA)/unpack.py' data
	cp '$(DATA)/text/tinyshakespeare.txt' '$(DATA)/checkpoints/resnet56-4bfd9763.th' data/

reproduce: $(READY)
	-test -e data || $(MAKE) data
	$(BIN)/mpc-dist reproduce all --quick

gpu-check: $(READY)
	$(BIN)/python launch/gpu_check.py

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
