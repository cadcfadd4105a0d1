"""Small chains of every kind, and comparison of gradients parameter by parameter."""

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mpc_dist.models import GPT, BlockModel, Chain, ResLinear, ResMLP, ResNetCifar, build_chain
from mpc_dist.readout import ReadoutKind, mean_squared_error
from mpc_dist.task import Task

VECTORS = Task("regression", (6,), 6)
IMAGES = Task("classification", (3, 8, 8), 5)
TOKENS = Task("tokens", (7,), 11)

MODELS: dict[str, tuple[BlockModel, Task]] = {
    "res_linear": (ResLinear(num_blocks=5, width=6), VECTORS),
    "res_mlp": (ResMLP(num_blocks=5, width=6), VECTORS),
    "res_mlp on images": (ResMLP(num_blocks=4, width=7), IMAGES),
    "resnet_cifar": (ResNetCifar(blocks_per_group=2, channels=4), IMAGES),
    "gpt": (GPT(num_blocks=5, width=8, num_heads=2), TOKENS),
}


def draw_batch(task: Task, *, batch_size: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random inputs and labels for a task."""
    generator = torch.Generator().manual_seed(seed)
    if task.kind == "tokens":
        inputs, labels = torch.randint(0, task.num_outputs, (2, batch_size, *task.input_shape), generator=generator)
        return inputs, labels
    inputs = torch.randn(batch_size, *task.input_shape, generator=generator)
    if task.kind == "regression":
        return inputs, torch.randn(batch_size, task.num_outputs, generator=generator)
    return inputs, torch.randint(0, task.num_outputs, (batch_size,), generator=generator)


def build_example(name: str, *, readout: ReadoutKind = "local") -> tuple[Chain, Tensor, Tensor]:
    """A chain of that model with a readout at every boundary, and a batch for it."""
    model, task = MODELS[name]
    return (build_chain(model, task, readout=readout), *draw_batch(task))


def build_dense_chain(widths: list[int], *, num_outputs: int = 3, seed: int = 0) -> tuple[Chain, Tensor, Tensor]:
    """Tanh blocks between states of these widths, with trained heads, and a batch for them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        blocks = [nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, b)) for a, b in itertools.pairwise(widths)]
        readouts = {s: nn.Linear(width, num_outputs) for s, width in enumerate(widths[1:], start=1)}
        inputs, labels = torch.randn(4, widths[0]), torch.randn(4, num_outputs)
    return Chain(blocks, mean_squared_error, readouts), inputs, labels


def backward_gradients(model: Chain, loss: Tensor) -> dict[str, Tensor]:
    """What plain `loss.backward()` leaves in every parameter that it reaches."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, tolerance: float = 0.0) -> None:
    """Every parameter's gradient agrees: bit for bit, or within an absolute and relative tolerance."""
    assert set(actual) == set(expected), sorted(set(actual) ^ set(expected))
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
