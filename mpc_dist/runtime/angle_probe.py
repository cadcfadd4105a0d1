"""The angle profile of a model that no single rank holds: every adjoint travels the whole pipe.

The gradients of a block by all readouts meet on the block's own rank, so inner products need no communication; only
they, not the gradients, are gathered.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import Tensor, nn

from mpc_dist.profile.angle import AngleProfile, Gram, StageProbe, needed_readouts
from mpc_dist.profile.unchanged import unchanged
from mpc_dist.readout import Loss, read_loss
from mpc_dist.runtime.mesh import Mesh
from mpc_dist.runtime.microbatch import MicroBatches
from mpc_dist.runtime.segment import Scope
from mpc_dist.runtime.transport import Transport
from mpc_dist.schedule.action import Action, Op
from mpc_dist.windows import Windows


def probe_angles(
    mesh: Mesh,
    transport: Transport,
    blocks: Mapping[int, nn.Module],
    readouts: Mapping[int, nn.Module],
    loss: Loss,
    num_blocks: int,
    batches: Sequence[MicroBatches],
    *,
    scope: Scope,
    windows: Sequence[Windows] | None = None,
) -> AngleProfile:
    """Profile the gradients that these windows need (default: all); a rank gives its blocks and their readouts.

    They run forward in the scope in which they are trained.
    """
    first, last = min(blocks), max(blocks)
    needed = needed_readouts(num_blocks, windows)
    modules = nn.ModuleList([*blocks.values(), *readouts.values()])
    grams = []
    present = 0  # the micro-batch that is run

    def enter(part: int) -> AbstractContextManager[object]:
        return scope(part, present)

    def loss_at(boundary: int, state: Tensor, labels: Tensor) -> Tensor:
        with enter(-boundary):
            prediction = readouts[boundary](state)
        return read_loss(loss, prediction, labels)

    with unchanged(modules):
        for batch in batches:
            own = [blocks[t] for t in sorted(blocks)]
            probe = StageProbe(own, first, loss_at, needed, enter)
            # The adjoints that enter from the rank above, and those that go on to the rank below.
            entering = [s for s, stop in sorted(probe.lowest.items()) if s > last + 1 and stop <= last]
            leaving = [s for s, stop in sorted(probe.lowest.items()) if s > first and stop < first]
            for m in range(batch.number):
                present = m
                # Without a label that counts, a micro-batch has no gradient.
                share = batch.counts[m] / sum(batch.counts) if batch.counts and batch.counts[m] else 0.0
                activation = Action(Op.RECEIVE_ACTIVATION, first, m)
                adjoints = [Action(Op.RECEIVE_ADJOINT, last, m, s) for s in entering]
                transport.expect([*([activation] if mesh.stage else []), *adjoints])
                source = transport.receive(activation) if mesh.stage else batch.inputs[m]
                state = probe.forward(source, batch.labels[m] if batch.labels else None, share=share)
                if mesh.stage + 1 < mesh.num_stages:
                    transport.send(Action(Op.SEND_ACTIVATION, last, m), state)
                arrived = {s: transport.receive(action) for s, action in zip(entering, adjoints, strict=True)}
                below = probe.backward(arrived)
                for s in leaving:
                    transport.send(Action(Op.SEND_ADJOINT, first, m, s), below[s])
            grams.append(probe.grams())
    return AngleProfile(tuple(_gather(mesh, own) for own in grams))


def _gather(mesh: Mesh, own: tuple[Gram, ...]) -> tuple[Gram, ...]:
    if mesh.stages is None:
        return own
    parts: list[tuple[Gram, ...]] = [()] * mesh.num_stages
    with mesh.watch.waiting(mesh.stages, "the angles of all stages"):
        dist.all_gather_object(parts, own, group=mesh.stages)
    return tuple(gram for part in parts for gram in part)
