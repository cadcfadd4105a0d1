"""`launch/train.py` against plain torch: a model, a loop and a data order written here, which share no code with ours.

Only the initial weights are taken from the package. Everything that a run leaves for its user is compared: weights in
the checkpoint, every logged loss and score, samples per second.
"""

import json
import runpy
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from mpc_dist.models import build_chain, build_parts
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch
from mpc_dist.training import job
from mpc_dist.training.job import train
from tests.conftest import ROOT
from tests.training.local import parse

Weights = dict[str, Tensor]
Numbers = dict[tuple[int, int], float]
"""By step and boundary."""

T, WIDTH, HEADS, CONTEXT, BATCH, STEPS, SEED = 4, 8, 2, 8, 8, 6, 5
NUM_TESTS = 19
"""No multiple of a batch: all are scored, over replicas of unequal shares."""
LETTERS = "abcdefghijkl"


@dataclass(frozen=True)
class Case:
    """One way to train, as told to both."""

    model: str = "res_mlp"
    is_local: bool = False
    """Every block learns from the loss of its own output; else all from the last."""
    dropout: float = 0.0
    stages: int = 1
    replicas: int = 1
    microbatches: int = 1
    optimizer: str = "sgd"
    momentum: float = 0.0
    decay: float = 0.0
    rate: str | None = None
    """A schedule of torch, and what it takes."""
    rate_arguments: str = "{}"
    clip: float | None = None
    clip_scope: str = "stage"

    def arguments(self, folder: Path, text: Path) -> list[str]:
        """The command line of `launch/train.py`."""
        data = {
            "res_mlp": f"--data.name trigonometric --data.num_train 61 --data.num_test {NUM_TESTS} --data.seed 3",
            "gpt": f"--model.num_heads {HEADS} --model.dropout {self.dropout} --data.name text --data.path {text} "
            f"--data.unit characters --data.context {CONTEXT} --data.test_fraction 0.3",
        }[self.model]
        windows = "sliding --horizon.size 1 --horizon.unit blocks" if self.is_local else "backprop"
        clip = f"--training.clip_norm {self.clip} --training.clip_scope {self.clip_scope}" if self.clip else ""
        rate = f"--optimizer.scheduler {self.rate} --optimizer.scheduler_arguments {self.rate_arguments}"
        return (
            f"--model.name {self.model} --model.num_blocks {T} --model.width {WIDTH} {data} "
            f"--horizon.windows {windows} --parallel.stages {self.stages} --data_parallel.degree {self.replicas} "
            f"--batch_size {BATCH} --parallel.microbatches {self.microbatches} --optimizer.name {self.optimizer} "
            f"--optimizer.lr 0.05 --optimizer.momentum {self.momentum} --optimizer.weight_decay {self.decay} "
            f"{rate if self.rate else ''} {clip} --training.steps {STEPS} --training.log_every 1 "
            "--training.eval_every 2 "
            f"--seed {SEED} --device cpu --training.precision float64 --training.folder {folder}"
        ).split()

    @property
    def rounding(self) -> float:
        """Relative, in float64: sums over micro-batches and replicas are made in another order."""
        return 1e-6 if self.clip_scope == "global" else 1e-9  # ranks sum the squares of all gradients in float32

    @property
    def readouts(self) -> Sequence[int]:
        """The boundaries at which losses are read."""
        return range(1, T + 1) if self.is_local else [T]


CASES = {
    "momentum, decay, steps and clipping": Case(
        microbatches=2, momentum=0.9, decay=0.1, rate="StepLR", rate_arguments='{"step_size":2,"gamma":0.5}', clip=0.3
    ),
    "adamw and local losses on two stages": Case(
        is_local=True, stages=2, microbatches=2, optimizer="adamw", decay=0.2, clip=0.2
    ),
    "momentum on two replicas of two stages, clipped globally": Case(
        stages=2, replicas=2, microbatches=4, momentum=0.8, decay=0.05, clip=0.2, clip_scope="global"
    ),
    "a transformer, clipped by stage": Case("gpt", stages=2, optimizer="adamw", decay=0.1, clip=0.1),
    "dropout": Case("gpt", dropout=0.3, microbatches=2, momentum=0.9),
    "dropout on two replicas": Case(
        *("gpt", False, 0.3), replicas=2, optimizer="adamw", rate="CosineAnnealingLR", rate_arguments='{"T_max":10}'
    ),
    "dropout and local losses on two stages": Case("gpt", True, 0.3, stages=2, microbatches=2, momentum=0.5),
}


# Plain torch.


def mlp_block(weights: Weights, t: int, state: Tensor, dropout: float) -> Tensor:
    out = F.linear(state, weights[f"blocks.{t}.linear.weight"], weights[f"blocks.{t}.linear.bias"])
    if t == T - 1:
        return out
    return F.relu(out) if t == 0 else state + F.relu(out)


def gpt_block(weights: Weights, t: int, state: Tensor, dropout: float) -> Tensor:
    prefix = f"blocks.{t}."
    if t == 0:
        places = weights["blocks.0.0.positions.weight"][: state.shape[1]]
        state = F.dropout(weights["blocks.0.0.tokens.weight"][state] + places, dropout)
        prefix = "blocks.0.1."
    part = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}

    def normed(name: str) -> Tensor:
        return F.layer_norm(state, (WIDTH,), part[f"{name}.weight"], part[f"{name}.bias"])

    def linear(name: str, inputs: Tensor) -> Tensor:
        return F.linear(inputs, part[f"{name}.weight"], part[f"{name}.bias"])

    query, key, value = (
        piece.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)
        for piece in linear("attention.qkv", normed("norm1")).chunk(3, dim=-1)
    )
    mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
    state = state + F.dropout(linear("attention.out", mixed.transpose(1, 2).flatten(2)), dropout)
    return state + F.dropout(linear("contract", F.gelu(linear("expand", normed("norm2")))), dropout)


def read_loss(
    case: Case, weights: Weights, boundary: int, state: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The loss, and which predictions are right where there is a right one."""
    head = f"readouts.{boundary}."
    if case.model == "res_mlp":
        if boundary < T:
            state = F.linear(state, weights[f"{head}linear.weight"], weights[f"{head}linear.bias"])
        return (state - labels).square().mean(), None
    state = F.layer_norm(state, (WIDTH,), weights[f"{head}norm.weight"], weights[f"{head}norm.bias"])
    logits = state @ weights[f"{head}linear.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits.argmax(-1) == labels


BLOCKS: dict[str, Callable[[Weights, int, Tensor, float], Tensor]] = {"res_mlp": mlp_block, "gpt": gpt_block}


def train_plainly(case: Case, weights: Weights, text: Path) -> tuple[Numbers, Numbers, Numbers]:
    """Train the weights; the losses of all replicas together, and loss and accuracy of every evaluation."""
    (inputs, labels), test = draw_samples(case, text)
    assert len(test[0]) == NUM_TESTS
    trained = list(weights.values())
    if case.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            trained, lr=0.05, momentum=case.momentum, weight_decay=case.decay
        )
    else:
        optimizer = torch.optim.AdamW(trained, lr=0.05, weight_decay=case.decay)
    rate = (
        getattr(torch.optim.lr_scheduler, case.rate)(optimizer, **json.loads(case.rate_arguments))
        if case.rate
        else None
    )
    losses: Numbers = {}
    test_losses: Numbers = {}
    accuracies: Numbers = {}
    size = BATCH * case.replicas
    for step in range(STEPS):
        epoch, place = divmod(step, len(inputs) // size)
        order = np.random.default_rng([1, SEED, epoch]).permutation(len(inputs))
        rows = torch.from_numpy(order[place * size : (place + 1) * size])
        total = torch.zeros((), dtype=torch.float64)
        for replica, own in enumerate(rows.chunk(case.replicas)):
            for microbatch, few in enumerate(own.chunk(case.microbatches)):
                state = inputs[few]
                for t in range(T):
                    torch.manual_seed(zlib.crc32(f"{SEED} {replica} {step} {microbatch} {t}".encode()))
                    state = BLOCKS[case.model](weights, t, state.detach() if case.is_local else state, case.dropout)
                    if t + 1 in case.readouts:
                        loss, _ = read_loss(case, weights, t + 1, state, labels[few])
                        loss = loss / case.microbatches
                        total = total + loss / case.replicas
                        losses[step + 1, t + 1] = losses.get((step + 1, t + 1), 0.0) + loss.item() / case.replicas
        optimizer.zero_grad()
        total.backward()
        clip(case, weights)
        optimizer.step()
        if rate is not None:
            rate.step()
        if (step + 1) % 2 == 0:
            state = test[0]
            for t in range(T):
                state = BLOCKS[case.model](weights, t, state, 0.0)
                if t + 1 in case.readouts:
                    loss, is_right = read_loss(case, weights, t + 1, state, test[1])
                    test_losses[step + 1, t + 1] = loss.item()
                    if is_right is not None:
                        accuracies[step + 1, t + 1] = is_right.double().mean().item()
    return losses, test_losses, accuracies


def clip(case: Case, weights: Weights) -> None:
    """By the norm of all gradients, or of those of each half of the blocks, with the heads at their ends."""
    if case.clip is None:
        return
    groups: dict[int, list[Tensor]] = {}
    for name, weight in weights.items():
        kind, number, *_ = name.split(".")
        block = int(number) - (kind == "readouts")
        is_apart = case.stages == 2 and case.clip_scope == "stage"
        groups.setdefault(2 * block // T if is_apart else 0, []).append(weight)
    for group in groups.values():
        norm = sum(w.grad.square().sum() for w in group if w.grad is not None) ** 0.5
        for weight in group:
            if weight.grad is not None:
                weight.grad *= min(1.0, case.clip / (norm.item() + 1e-6))


def draw_samples(case: Case, text: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Inputs and labels for training and for testing."""
    if case.model == "gpt":
        tokens = torch.tensor([LETTERS.index(letter) for letter in text.read_text()])
        cut = round(len(tokens) * 0.7)
        found = [part[: (len(part) - 1) // CONTEXT * CONTEXT + 1] for part in (tokens[:cut], tokens[cut:])]
        chunks = [(part[:-1].view(-1, CONTEXT), part[1:].view(-1, CONTEXT)) for part in found]
        return chunks[0], chunks[1]
    pairs = []
    for part, count in enumerate((61, NUM_TESTS)):
        rng = np.random.default_rng([3, 3, part])
        x = rng.uniform(-2.0, 2.0, (count, 1))
        noise = 1 + rng.normal(0.0, 0.03**0.5, (count, 1))
        waves = [np.cos(np.pi * x), np.sin(np.pi * x), np.cos(2 * np.pi * x), np.sin(2 * np.pi * x)]
        values = (x, noise * np.concatenate(waves, axis=1))
        pairs.append(tuple(torch.from_numpy(value).float().double() for value in values))
    return pairs[0], pairs[1]  # type: ignore[return-value]


# What the trainer left.


def launch_rank(rank: int, arguments: list[str]) -> None:
    sys.argv = ["train.py", *arguments]
    code = runpy.run_path(str(ROOT / "launch" / "train.py"))["main"]()
    assert code == 0


def read_lines(folder: Path, rank: int) -> list[dict]:
    return [json.loads(line) for line in (folder / f"metrics-rank{rank}.jsonl").read_text().splitlines()]


def assert_same(found: Numbers, expected: Numbers, rounding: float) -> None:
    assert found.keys() == expected.keys()
    for key, number in expected.items():
        assert found[key] == pytest.approx(number, rel=rounding), key


@pytest.mark.parametrize("name", CASES)
def test_launch_train_does_what_plain_torch_does(name: str, tmp_path: Path):
    case, folder, text = CASES[name], tmp_path / "run", tmp_path / "text.txt"
    drawn = np.random.default_rng(1).integers(0, len(LETTERS), 532)
    text.write_text("".join(LETTERS[number] for number in [*range(len(LETTERS)), *drawn[len(LETTERS) :]]))
    arguments = case.arguments(folder, text)
    config = parse(arguments)
    model = build_chain(config.model, config.data.load().task, boundaries=case.readouts, seed=SEED)
    initial = {name: weight.detach().double() for name, weight in model.state_dict().items()}

    began = time.perf_counter()
    num_ranks = case.stages * case.replicas
    run_local_ranks(launch_rank, num_ranks, arguments)
    took = time.perf_counter() - began

    weights = {name: weight.clone().requires_grad_() for name, weight in initial.items()}
    losses, test_losses, accuracies = train_plainly(case, weights, text)
    (saved,) = (folder / "checkpoints").glob("step-*")
    kept = {name: value for path in saved.glob("*.safetensors") for name, value in load_file(path).items()}
    for name, weight in weights.items():
        assert kept[name].dtype == torch.float64
        torch.testing.assert_close(kept[name], weight.detach(), rtol=case.rounding, atol=case.rounding)
        assert not torch.equal(weight, initial[name]), f"{name} must have been trained"
    assert {name for name in kept if name.startswith(("blocks.", "readouts."))} == set(weights)

    seen: Numbers = {}
    seen_tests: Numbers = {}
    seen_accuracies: Numbers = {}
    for rank in range(num_ranks):
        lines = read_lines(folder, rank)
        steps = [line for line in lines if line["event"] == "step"]
        assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
        for line in steps:
            for boundary, loss in line["losses"].items():
                # Every replica reports the loss of all.
                assert seen.setdefault((line["step"], int(boundary)), loss) == loss
            assert line["samples_per_second"] == BATCH * case.replicas / line["step_seconds"]
            assert 0 < line["busy_seconds"] <= line["step_seconds"]
        assert sum(line["step_seconds"] for line in steps) < took
        for before, after in pairwise(steps):
            # Two clocks: one may be set while the test runs, but not by much.
            assert after["step_seconds"] <= after["time"] - before["time"] + 1e-3
        for line in (line for line in lines if line["event"] == "evaluation"):
            for boundary, score in line["scores"].items():
                seen_tests[line["step"], int(boundary)] = score["loss"]
                if score["accuracy"] is not None:
                    seen_accuracies[line["step"], int(boundary)] = score["accuracy"]
        assert lines[-1]["event"] == "end"
        last = {boundary: score["loss"] for boundary, score in lines[-1]["scores"].items()}
        assert last == {str(b): seen_tests[STEPS, b] for b in case.readouts if str(b) in last}
    assert_same(seen, losses, case.rounding)
    assert_same(seen_tests, test_losses, case.rounding)
    assert_same(seen_accuracies, accuracies, case.rounding)


class Evaluating:
    """Parts that come in evaluation mode, as `from_pretrained` gives them."""

    def __init__(self, parts: Any) -> None:
        self._parts = parts

    def block(self, index: int) -> nn.Module:
        return self._parts.block(index).eval()

    def readout(self, boundary: int) -> nn.Module:
        return self._parts.readout(boundary).eval()


def test_the_trainer_puts_parts_into_training_mode_whatever_they_came_in(tmp_path: Path, monkeypatch):
    arguments = (
        "--model.name gpt --model.num_blocks 2 --model.width 8 --model.num_heads 2 --model.dropout 0.5 "
        "--data.context 8 --data.max_bytes 4000 --batch_size 4 --training.steps 2 --training.log_every 1 "
        "--training.eval_batches 1 --device cpu --training.folder"
    ).split()
    train(parse([*arguments, str(tmp_path / "training")]), Launch(), is_quiet=True)
    monkeypatch.setattr(job, "build_parts", lambda *a, **k: Evaluating(build_parts(*a, **k)))
    train(parse([*arguments, str(tmp_path / "evaluating")]), Launch(), is_quiet=True)
    found = [
        [line["losses"] for line in read_lines(tmp_path / kind, 0) if line["event"] == "step"]
        for kind in ("training", "evaluating")
    ]
    assert len(found[0]) == 2
    assert found[0] == found[1]
