"""What each block and readout costs: seconds and bytes for one micro-batch.

Bytes are counted exactly as autograd saves them (see `memory.py`); on CUDA the runtime's own buffers come on top. With
fake tensors nothing is allocated and nothing runs: bytes are as exact, and times follow from counted operations.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from mpc_dist.gradient import HeldBlock
from mpc_dist.models.chain import Chain
from mpc_dist.planner.measurements import MESSAGES_HELD, MESSAGES_HELD_ON_GPU, BlockCosts, Measurements, ReadoutCosts
from mpc_dist.precision import (
    FULL,
    Precision,
    cast_bytes,
    gradient_bytes,
    gradient_type,
    gradients_as_weights,
    sum_in_float32,
)
from mpc_dist.profile.memory import SavedBytes
from mpc_dist.profile.unchanged import unchanged

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Clock = Callable[[Callable[[], object]], float]
"""Seconds that a function takes."""


def _count_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _count_attention_backward(out: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(out, query, key, value))  # type: ignore[no-untyped-call]


# torch's counter knows the attention of GPUs, not that of CPUs.
ATTENTION: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _count_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _count_attention_backward,
}


def without_allocating() -> FakeTensorMode:
    """A context in which tensors have shapes but no memory."""
    return FakeTensorMode()


def measure_blocks(
    chain: Chain,
    inputs: Tensor,
    labels: Tensor,
    optimizer: OptimizerFactory,
    *,
    precision: Precision = FULL,
    repeats: int = 5,
    flops_per_second: float | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Measurements:
    """Measure every block and readout on a micro-batch; the chain needs a readout at every boundary.

    `flops_per_second` replaces the clock by counted operations, and is needed for fake tensors.
    """
    is_fake = isinstance(inputs, FakeTensor)
    if is_fake and flops_per_second is None:
        raise ValueError("fake tensors do not run; say how many operations per second a GPU does")
    clock = _timer(inputs.device) if flops_per_second is None else _counter(flops_per_second)
    trained = [parameter for parameter in chain.parameters() if parameter.requires_grad]
    sum_in_float32(trained)
    with unchanged(chain), precision.step_scope(inputs.device):
        counted = _count_bytes(chain, inputs, labels, precision)
        # The first round warms up; counting needs one only.
        rounds = [
            _time_round(chain, counted.states, labels, precision, clock, advance)
            for _ in range(repeats + 1 if flops_per_second is None else 1)
        ]
        timed = rounds[1:] or rounds
        per_byte = _time_update(chain, optimizer, clock, is_fake=is_fake)
        kept = {part: _count_state(part, optimizer) for part in (*chain.blocks, *chain.readouts.values())}
    for parameter in chain.parameters():
        parameter.grad = None
    blocks, readouts = [], []
    for t, block in enumerate(chain.blocks):
        forward, reading, input_grad, whole = (statistics.median(one[t][kind] for one in timed) for kind in range(4))
        size, fixed = _weight_bytes(block)
        state = counted.states[t + 1]
        blocks.append(
            BlockCosts(
                forward,
                input_grad,
                max(0.0, whole - input_grad),
                counted.saved[t],
                counted.shared[t],
                state.nbytes,
                size,
                fixed + counted.cast[t],
                kept[block],
                precision.message_type(state.dtype).itemsize / state.itemsize,
            )
        )
        head = chain.readouts[str(t + 1)]
        size, fixed = _weight_bytes(head)
        readouts.append(ReadoutCosts(reading, counted.read[t], size, fixed + counted.cast_to_read[t], kept[head]))
    gradients = sum(map(gradient_bytes, trained)) / max(1, sum(parameter.nbytes for parameter in trained))
    how = "counted operations" if flops_per_second is not None else f"measured on {inputs.device.type}"
    # Operations are counted for GPUs.
    is_for_gpu = flops_per_second is not None or inputs.device.type == "cuda"
    messages_held = MESSAGES_HELD_ON_GPU if is_for_gpu else MESSAGES_HELD
    return Measurements(
        len(inputs),
        tuple(blocks),
        tuple(readouts),
        per_byte,
        how,
        gradients if trained else 1.0,
        messages_held,
    )


class _Counted(NamedTuple):
    """Bytes of a micro-batch by block, and its states."""

    saved: list[int]
    """Beyond what the block below saves."""
    shared: list[int]
    """Of its input, what the block below saves too."""
    cast: list[int]
    """Of autocast's copies of its weights."""
    read: list[int]
    """Saved while the loss at its end is read."""
    cast_to_read: list[int]
    """Of autocast's copies of that readout's weights."""
    states: list[Tensor]
    """x(0)..x(T)."""


def _count_bytes(chain: Chain, inputs: Tensor, labels: Tensor, precision: Precision) -> _Counted:
    given = [*chain.parameters(), *chain.buffers(), inputs, labels]
    found, held = _Counted([], [], [], [], [], [inputs]), []
    with SavedBytes(given) as count:
        for boundary, block in enumerate(chain.blocks, start=1):
            before = count.live
            held.append(HeldBlock.run(block, found.states[-1], boundary - 1, precision))
            found.saved.append(count.live - before)
            found.cast.append(cast_bytes(held[-1].output))
            found.states.append(held[-1].output.detach())
            before = count.peak = count.live
            loss = chain.loss_at(boundary, found.states[-1].detach().requires_grad_(), labels, precision)
            found.read.append(count.peak - before)
            found.cast_to_read.append(cast_bytes(loss))
            del loss
    del held
    for t, block in enumerate(chain.blocks):
        with SavedBytes(given) as alone:
            one = HeldBlock.run(block, found.states[t], t, precision)
        found.shared.append(max(0, alone.live - found.saved[t]) if t else 0)
        del one
    return found


def _time_round(
    chain: Chain,
    states: list[Tensor],
    labels: Tensor,
    precision: Precision,
    clock: Clock,
    advance: Callable[[], None],
) -> list[tuple[float, float, float, float]]:
    """Per block: forward, reading its loss, input gradient, whole backward.

    Blocks follow one another as in training, so that caches are as cold as they will be, and gradients add up.
    """
    held: list[HeldBlock] = []
    forward, reading, input_grad, whole = [], [], [0.0] * chain.num_blocks, [0.0] * chain.num_blocks
    for t, block in enumerate(chain.blocks):
        forward.append(clock(lambda t=t, block=block: held.append(HeldBlock.run(block, states[t], t, precision))))  # type: ignore[misc]
        reading.append(clock(lambda t=t: _read(chain, t + 1, states[t + 1], labels, precision)))  # type: ignore[misc]
    adjoints = [torch.ones_like(one.output) for one in held]
    for t in reversed(range(1, chain.num_blocks)):
        one, adjoint = held[t], adjoints[t]
        input_grad[t] = clock(lambda one=one, adjoint=adjoint: one.pull_back(adjoint, weights=False, to_input=True))  # type: ignore[misc]
    for t in reversed(range(chain.num_blocks)):
        sources = [p for p in chain.blocks[t].parameters() if p.requires_grad] + ([held[t].input] if t else [])
        if sources:
            one, adjoint = held.pop(), adjoints.pop()
            whole[t] = clock(
                lambda one=one, adjoint=adjoint, sources=sources: torch.autograd.backward(  # type: ignore[misc]
                    one.output, adjoint, inputs=sources
                )
            )
        advance()
    return list(zip(forward, reading, input_grad, whole, strict=True))


def _read(chain: Chain, boundary: int, state: Tensor, labels: Tensor, precision: Precision) -> None:
    weights = [p for p in chain.readouts[str(boundary)].parameters() if p.requires_grad]
    leaf = state.detach().requires_grad_()
    torch.autograd.backward(chain.loss_at(boundary, leaf, labels, precision), inputs=[leaf, *weights])


def _time_update(chain: Chain, factory: OptimizerFactory, clock: Clock, *, is_fake: bool) -> float:
    """Seconds of the optimizer's step per byte of trained weights, of the largest block."""
    largest = max(chain.blocks, key=lambda block: _weight_bytes(block)[0])
    size, _ = _weight_bytes(largest)
    if not size or is_fake:
        return 0.0
    with _updating(largest, factory) as optimizer:
        return min(clock(optimizer.step) for _ in range(3)) / size


def _count_state(part: nn.Module, factory: OptimizerFactory) -> int:
    """Bytes that the optimizer keeps of a part."""
    if not any(parameter.requires_grad for parameter in part.parameters()):
        return 0
    with _updating(part, factory) as optimizer:
        values = [value for state in optimizer.state.values() for value in state.values()]
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


@contextmanager
def _updating(part: nn.Module, factory: OptimizerFactory) -> Iterator[torch.optim.Optimizer]:
    """Its optimizer after a step; afterwards the weights are as before."""
    parameters = [parameter for parameter in part.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter, dtype=gradient_type(parameter))
    optimizer = factory(parameters)
    with gradients_as_weights(parameters):
        optimizer.step()
        yield optimizer
    for parameter, value in zip(parameters, before, strict=True):
        parameter.detach().copy_(value)


def _weight_bytes(module: nn.Module) -> tuple[int, int]:
    """(trained, not trained)."""
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    frozen = sum(p.nbytes for p in module.parameters() if not p.requires_grad)
    return trained, frozen + sum(buffer.nbytes for buffer in module.buffers())


def _timer(device: torch.device) -> Clock:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def seconds(function: Callable[[], object]) -> float:
        wait()
        start = time.perf_counter()
        function()
        wait()
        return time.perf_counter() - start

    return seconds


def _counter(flops_per_second: float) -> Clock:
    def seconds(function: Callable[[], object]) -> float:
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
            function()
        return float(counter.get_total_flops()) / flops_per_second

    return seconds
