"""Real gloo ranks equal the sequential reference, and never wait for ever."""

import copy
import os
import signal
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpc_dist.models import Chain
from mpc_dist.profile import AngleProfile, measure_angles
from mpc_dist.readout import Shared
from mpc_dist.runtime import Pipeline, StageOptions
from mpc_dist.runtime.local import LocalRankError, run_local_ranks
from mpc_dist.runtime.mesh import Launch, build_mesh
from mpc_dist.runtime.shared_head import SharedHead
from mpc_dist.runtime.watch import Watch
from mpc_dist.schedule import lay_out, split_evenly
from mpc_dist.windows import Windows, backprop, cumulative, expand, loco, sliding, tumbling
from tests.examples import build_dense_chain, build_example
from tests.runtime.reference import train_reference

TIMEOUT = timedelta(seconds=20)
T, STEPS = 6, 6


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


def windows_for(name: str, partition: tuple[int, ...]) -> Windows:
    kind, _, size = name.partition(" ")
    if kind == "stages":
        return expand(sliding(len(partition), int(size)), partition)
    named = {"loco": loco, "backprop": backprop}
    if kind in named:
        return named[kind](T)
    return {"sliding": sliding, "tumbling": tumbling, "cumulative": cumulative}[kind](T, int(size))


CASES = [
    ("stages 1", "sgd", False),
    ("stages 2", "adamw", True),
    ("sliding 1", "adamw", False),
    ("sliding 2", "sgd", True),
    ("sliding 3", "adamw", False),
    ("backprop", "sgd", False),
    ("backprop", "adamw", True),
    ("tumbling 2", "adamw", True),
    ("cumulative 3", "sgd", False),
    ("loco", "adamw", True),
]


def batches(num_replicas: int = 1) -> list[list[tuple[Tensor, Tensor]]]:
    """For each step, a batch for each replica."""
    generator = torch.Generator().manual_seed(7)
    draw = lambda: torch.randn(6, 3, generator=generator)  # noqa: E731
    return [[(draw(), draw()) for _ in range(num_replicas)] for _ in range(STEPS)]


def connect(rank: int, partition: tuple[int, ...], windows: Windows, chain: Chain, **settings) -> Pipeline:
    replicas = settings.pop("replicas", 1)
    launch = Launch(rank, len(partition) * replicas, rank)
    mesh = build_mesh(launch, num_stages=len(partition), num_replicas=replicas, timeout=TIMEOUT)
    return Pipeline(
        mesh,
        lay_out(windows, partition),
        build_block=lambda t: chain.blocks[t],
        build_readout=lambda s: chain.readouts[str(s)],
        loss=chain.loss,
        timeout=TIMEOUT,
        **settings,
    )


def train_cases(rank: int, partition: tuple[int, ...], num_replicas: int) -> list[dict[str, Tensor]]:
    """Train every case without a barrier between steps; this rank's weights afterwards."""
    torch.set_default_dtype(torch.float64)
    results = []
    for name, optimizer, split in CASES:
        chain, _, _ = build_dense_chain([3, 4, 5, 4, 3, 4, 3])
        pipeline = connect(
            rank,
            partition,
            windows_for(name, partition),
            chain,
            optimizer=OPTIMIZERS[optimizer],
            num_microbatches=3,
            split=split,
            replicas=num_replicas,
        )
        for step in batches(num_replicas):
            pipeline.step(*step[pipeline.mesh.replica])
        pipeline.close()
        assert not pipeline.stage.executor.left_over()
        assert 0 <= pipeline.seconds_waiting < 120  # no more than it took
        assert not any(channel.sent for channel in pipeline._transport._channels.values())  # all has been taken
        results.append({key: value.detach().clone() for key, value in pipeline.named_parameters().items()})
    return results


@pytest.mark.parametrize(
    ("partition", "num_replicas"), [((2, 4), 1), ((1, 3, 2), 1), ((2, 1, 2, 1), 1), ((4, 2), 2)], ids=str
)
@pytest.mark.usefixtures("float64")
def test_weights_after_six_steps_on_gloo_ranks_equal_the_sequential_reference(partition, num_replicas):
    by_rank = run_local_ranks(train_cases, len(partition) * num_replicas, partition, num_replicas)
    for case, (name, optimizer, _) in enumerate(CASES):
        chain, _, _ = build_dense_chain([3, 4, 5, 4, 3, 4, 3])
        windows = windows_for(name, partition)
        # Replicas average their gradients: the reference takes their batches as more micro-batches of one.
        joined = [tuple(torch.cat(parts) for parts in zip(*step, strict=True)) for step in batches(num_replicas)]
        train_reference(chain, joined, windows, 3 * num_replicas, OPTIMIZERS[optimizer])
        reference = dict(chain.named_parameters())
        seen = set()
        for rank, results in enumerate(by_rank):
            for key, value in results[case].items():
                seen.add(key)
                # As in one process: AdamW magnifies rounding in its first steps.
                torch.testing.assert_close(
                    value, reference[key].detach(), rtol=1e-9, atol=1e-9, msg=f"{name}, rank {rank}, {key}"
                )
        assert {key for key in reference if key.startswith("blocks.")} <= seen


def probe(rank: int, partition: tuple[int, ...]) -> AngleProfile:
    torch.set_default_dtype(torch.float64)
    chain, _, _ = build_dense_chain([3] * (T + 1))
    pipeline = connect(rank, partition, sliding(T, 2), chain, optimizer=sgd, num_microbatches=3)
    given = [step[0] for step in batches()]
    pipeline.step(*given[0])
    weights = {key: value.clone() for key, value in pipeline.named_parameters().items()}
    profile = pipeline.measure_angles(given[1:3])
    assert all(torch.equal(weights[key], value) for key, value in pipeline.named_parameters().items())
    pipeline.step(*given[3])  # training goes on after it
    pipeline.close()
    return profile


@pytest.mark.parametrize("partition", [(2, 1, 2, 1), (4, 2)], ids=str)
@pytest.mark.usefixtures("float64")
def test_the_angle_probe_over_ranks_equals_the_profile_of_one_process(partition):
    chain, _, _ = build_dense_chain([3] * (T + 1))
    given = [step[0] for step in batches()]
    train_reference(chain, given[:1], sliding(T, 2), 3, sgd)
    expected = measure_angles(chain, given[1:3])
    for found in run_local_ranks(probe, len(partition), partition):
        for batch, other in zip(found.grams, expected.grams, strict=True):
            for gram, wanted in zip(batch, other, strict=True):
                np.testing.assert_allclose(gram, wanted, rtol=1e-10, atol=1e-12)
        for windows in (sliding(T, 1), sliding(T, 3), cumulative(T, 2), tumbling(T, 2)):
            assert found.cosine(windows) == pytest.approx(expected.cosine(windows), abs=1e-10)


def build_chain_with_one_head() -> Chain:
    chain, _, _ = build_dense_chain([3] * (T + 1))
    head = chain.readouts[str(T)]
    return Chain(list(chain.blocks), chain.loss, {**{s: Shared(head) for s in range(1, T)}, T: head})


def train_with_one_head(rank: int, partition: tuple[int, ...]) -> tuple[dict[str, Tensor], float]:
    torch.set_default_dtype(torch.float64)
    chain = build_chain_with_one_head()
    if rank < len(partition) - 1:
        with torch.no_grad():
            chain.readouts[str(T)].weight.zero_()  # ranks need not begin with the same copy
    windows = sliding(T, 2)
    pipeline = connect(rank, partition, windows, chain, optimizer=adamw, num_microbatches=3, split=True)
    for ((inputs, labels),) in batches():
        pipeline.step(inputs, labels)
    pipeline.close()
    return {key: value.detach() for key, value in pipeline.named_parameters().items()}, (
        pipeline.seconds_waiting_for_head
    )


@pytest.mark.usefixtures("float64")
def test_a_shared_head_is_the_last_stages_at_every_step():
    partition = (2, 3, 1)
    chain = build_chain_with_one_head()
    train_reference(chain, [step[0] for step in batches()], sliding(T, 2), 3, adamw)
    reference = dict(chain.named_parameters())
    by_rank = run_local_ranks(train_with_one_head, len(partition), partition)
    found = {key: value for weights, _ in by_rank for key, value in weights.items()}
    assert set(found) == set(reference)
    for key, value in found.items():
        torch.testing.assert_close(value, reference[key].detach(), rtol=1e-9, atol=1e-9, msg=key)
    waits = [seconds for _, seconds in by_rank]
    assert waits[0] > 0
    assert waits[-1] == 0


def leave_a_pipeline(rank: int) -> bool:
    """Whether the process group is still there once the pipeline's context has ended."""
    chain, inputs, labels = build_dense_chain([3, 4, 3])
    with connect(rank, (1, 1), sliding(2, 1), chain, optimizer=adamw) as pipeline:
        pipeline.step(inputs, labels)
    return dist.is_initialized()


def test_the_end_of_a_pipelines_context_leaves_the_group():
    assert run_local_ranks(leave_a_pipeline, 2) == [False, False]


def wait_no_longer(rank: int) -> list[float]:
    """The seconds after which each of this rank's groups gives up, once the mesh has another timeout."""
    mesh = build_mesh(Launch(rank, 4, rank), num_stages=2, num_replicas=2, timeout=TIMEOUT)
    mesh = mesh.with_timeout(timedelta(seconds=7))
    assert mesh.timeout == timedelta(seconds=7)
    edges = [edge for edge in (mesh.before, mesh.after) if edge is not None]
    groups = [dist.group.WORLD, mesh.stages, mesh.replicas, mesh.background]
    groups += [group for edge in edges for group in (edge.downward, edge.upward)]
    return [group._get_backend(mesh.device).options._timeout.total_seconds() for group in groups]


def test_a_timeout_that_changes_holds_for_every_group():
    assert run_local_ranks(wait_no_longer, 4) == [[7.0] * 6] * 4


def share_copies(rank: int) -> int:
    """How many heads this rank's readouts read through, each of which was built with a copy of its own."""
    chain, inputs, labels = build_dense_chain([3] * (T + 1))
    head = chain.readouts[str(T)]
    for s in range(1, T):
        chain.readouts[str(s)] = Shared(copy.deepcopy(head))
    pipeline = connect(rank, (3, 3), sliding(T, 1), chain, optimizer=adamw)
    pipeline.step(inputs, labels)
    pipeline.close()
    readouts = pipeline._readouts.values()
    return len({id(one.head if isinstance(one, Shared) else one) for one in readouts})


def test_all_readouts_of_a_rank_read_through_one_copy_of_the_shared_head():
    assert run_local_ranks(share_copies, 2) == [1, 1]


def wait_for_the_head(rank: int) -> tuple[int, ...]:
    """Whom this rank says that it waits for while the last of three sends its head."""
    watch = Watch(rank)
    head = SharedHead(torch.nn.Linear(2, 2), source=2, rank=rank, group=dist.group.WORLD, watch=watch)
    head.start()
    work, flat = head._under_way
    said = []

    class Work:
        def wait(self) -> None:
            said.append(watch.wait.peers)
            work.wait()

    head._under_way = Work(), flat
    head.finish()
    (peers,) = said
    return peers


def test_readers_of_a_shared_head_wait_for_its_owner_and_the_owner_for_all_of_them():
    assert run_local_ranks(wait_for_the_head, 3) == [(2,), (2,), (0, 1)]


def evaluate_and_clip(rank: int) -> tuple[dict[int, tuple[float, float | None]], float]:
    chain, inputs, labels = build_example("gpt")
    norms = []

    class Watch(torch.optim.SGD):
        def step(self, closure=None):
            gradients = [p.grad.flatten() for group in self.param_groups for p in group["params"] if p.grad is not None]
            norms.append(float(torch.cat(gradients).square().sum()))

    pipeline = connect(
        rank,
        (2, 3),
        sliding(5, 2),
        chain,
        optimizer=lambda parameters: Watch(parameters, lr=0.0),
        num_microbatches=2,
        options=StageOptions(clip_norm=1e-3, clip_scope="global"),
    )
    scores = pipeline.evaluate(inputs, labels)
    pipeline.step(inputs, labels)
    pipeline.close()
    return {s: (score.loss, score.accuracy) for s, score in scores.items()}, norms[0]


def test_evaluation_and_global_clipping_over_ranks():
    answers = run_local_ranks(evaluate_and_clip, 2)
    chain, inputs, labels = build_example("gpt")
    chain.eval()
    scores = {s: values for found, _ in answers for s, values in found.items()}
    assert sorted(scores) == [2, 3, 4, 5]
    state = inputs
    for boundary, block in enumerate(chain.blocks, start=1):
        state = block(state)
        if boundary in scores:
            assert scores[boundary][0] == pytest.approx(chain.loss_at(boundary, state, labels).item(), rel=1e-5)
    assert sum(squares for _, squares in answers) == pytest.approx(1e-6, rel=1e-2)


class Short(nn.Module):
    """Gives another shape from its third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, state: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(state)[:1] if self.calls > 2 else self.linear(state)


def send_another_shape(rank: int) -> None:
    chain = Chain([Short(), nn.Linear(3, 3)], lambda prediction, labels: prediction.sum() + 0 * labels.sum())
    pipeline = connect(rank, (1, 1), sliding(2, 1), chain, optimizer=sgd)
    for _ in range(3):
        pipeline.step(torch.randn(4, 3), torch.randn(4, 3))


def test_a_message_of_another_shape_is_refused_by_its_sender():
    answers = run_local_ranks(send_another_shape, 2, may_fail=True, group_timeout=5, timeout=60)
    assert "rank 0 would send (1, 3) torch.float32 at SA0.0, but rank 1 expects (4, 3)" in answers[0]


def send_short(rank: int) -> str:
    import torch.distributed as dist

    from mpc_dist.runtime.transport import ACTIVATIONS, Channel, DistributedTransport
    from mpc_dist.schedule import parse_action

    group = dist.new_group([0, 1], timeout=TIMEOUT)
    if rank == 0:
        dist.isend(torch.ones(2), dst=1, group=group).wait()
        return ""
    channel = Channel(0, group, torch.Size([4]), torch.float32, torch.device("cpu"))
    transport = DistributedTransport({("receive", ACTIVATIONS): channel}, rank=1, timeout=TIMEOUT)
    transport.expect([parse_action("RA1.0")])
    try:
        transport.receive(parse_action("RA1.0"))
    except Exception as error:
        return str(error)
    return "nothing was noticed"


def test_a_short_message_is_noticed_on_arrival():
    assert run_local_ranks(send_short, 2)[1] == "rank 1 got a short message at RA1.0 from rank 0"


def stop_in_the_middle(rank: int, victim: int, how: str) -> None:
    chain, inputs, labels = build_dense_chain([3, 4, 5, 4])
    timeout = timedelta(seconds=60 if how == "dies" else 8)
    mesh = build_mesh(Launch(rank, 3, rank), num_stages=3, timeout=timeout)
    pipeline = Pipeline(
        mesh,
        lay_out(backprop(3), split_evenly(3, 3)),
        build_block=lambda t: chain.blocks[t],
        build_readout=lambda s: chain.readouts[str(s)],
        loss=chain.loss,
        optimizer=sgd,
        timeout=timeout,
    )
    for step in range(1000):
        if step == 3 and rank == victim:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(15)
        pipeline.step(inputs, labels)


@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_a_rank_that_dies_or_stalls_does_not_hang_the_others(how):
    """Every wait is bounded, and the error names rank, action, micro-batch and peer."""
    answers = run_local_ranks(stop_in_the_middle, 3, 1, how, may_fail=True, timeout=60, group_timeout=20)
    for rank in (0, 2):
        assert "PeerError" in answers[rank]
        assert f"rank {rank} gave up" in answers[rank]
        assert "rank 1 at " in answers[rank]
        assert "(micro-batch 0)" in answers[rank]


def raise_on_rank_one(rank: int) -> int:
    if rank == 1:
        raise RuntimeError("on purpose")
    return rank


def test_the_helper_reports_what_a_rank_raised():
    with pytest.raises(LocalRankError, match="rank 1 raised"):
        run_local_ranks(raise_on_rank_one, 2, group_timeout=5)


def test_a_world_that_does_not_fit_is_refused_before_anything_is_joined():
    with pytest.raises(ValueError, match="3 processes were started, but 2 stages x 1 replicas need 2; start 2"):
        build_mesh(Launch(0, 3, 0), num_stages=2, timeout=TIMEOUT)
    with pytest.raises(ValueError, match="must be whole numbers"):
        Launch.from_environment({"RANK": "x"})
    assert Launch.from_environment({}) == Launch(0, 1, 0)


def test_a_single_process_needs_no_group():
    chain, inputs, labels = build_dense_chain([3, 4, 5, 4])
    mesh = build_mesh(Launch(), num_stages=1, timeout=TIMEOUT)
    pipeline = Pipeline(
        mesh,
        lay_out(sliding(3, 1), (3,)),
        build_block=lambda t: chain.blocks[t],
        build_readout=lambda s: chain.readouts[str(s)],
        loss=chain.loss,
        optimizer=sgd,
    )
    result = pipeline.step(inputs, labels)
    assert sorted(result.losses) == [1, 2, 3]
