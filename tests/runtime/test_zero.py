"""DeepSpeed's ZeRO behind the pipeline: the weights of a run without it, with half the optimizer's bytes."""

from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpc_dist.models import Chain
from mpc_dist.readout import mean_squared_error
from mpc_dist.runtime import Pipeline, StageOptions
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch, build_mesh
from mpc_dist.runtime.state import Fragment
from mpc_dist.runtime.zero import ZeroSettings
from mpc_dist.schedule import lay_out
from mpc_dist.training.config import ConfigParser
from mpc_dist.training.job import train as train_as_configured
from mpc_dist.training.metrics import read_metrics
from mpc_dist.windows import Windows, backprop, cumulative, sliding, tumbling
from tests.conftest import ROOT
from tests.examples import build_dense_chain

TIMEOUT = timedelta(seconds=60)
WIDTHS = [3, 40, 5, 40, 3, 40, 3]
T, K, D = 6, 2, 2  # blocks, stages, replicas
STEPS = 10
TINY = (
    "--model.num_blocks 2 --model.width 16 --data.context 16 --data.max_bytes 30000 --optimizer.lr 0.02 "
    "--training.steps 3 --training.log_every 1 --training.eval_batches 1"
).split()


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


OPTIMIZERS = {"adamw": adamw, "sgd": sgd}


@dataclass(frozen=True)
class Case:
    windows: Windows
    optimizer: str = "adamw"
    split: bool = False
    clip_norm: float | None = None
    clip_scope: str = "stage"
    scheduled: bool = False
    stage: int | None = None


CASES = {
    "relays": Case(sliding(T, 3)),
    "split relays, scheduled": Case(sliding(T, 2), split=True, scheduled=True),
    "back-propagation": Case(backprop(T), "sgd"),
    "many readouts": Case(cumulative(T, 3), "sgd", split=True),
    "clipped per stage": Case(tumbling(T, 2), clip_norm=0.05),
    "clipped globally": Case(sliding(T, 2), "sgd", clip_norm=0.05, clip_scope="global"),
}


def batches(steps: int = STEPS) -> list[list[tuple[Tensor, Tensor]]]:
    """For each step, a batch for each replica."""
    generator = torch.Generator().manual_seed(7)
    draw = lambda: torch.randn(6, 3, generator=generator)  # noqa: E731
    return [[(draw(), draw()) for _ in range(D)] for _ in range(steps)]


def connect(rank: int, case: Case, chain: Chain, partition: tuple[int, ...] = (4, 2), extra: dict | None = None):
    mesh = build_mesh(Launch(rank, K * D, rank), num_stages=K, num_replicas=D, timeout=TIMEOUT)
    return Pipeline(
        mesh,
        lay_out(case.windows, partition),
        build_block=lambda t: chain.blocks[t],
        build_readout=lambda s: chain.readouts[str(s)],
        loss=chain.loss,
        optimizer=OPTIMIZERS[case.optimizer],
        num_microbatches=3,
        split=case.split,
        options=StageOptions(clip_norm=case.clip_norm, clip_scope=case.clip_scope),
        zero=None if case.stage is None else ZeroSettings(case.stage, extra or {}),
        timeout=TIMEOUT,
    )


def state_bytes(pipeline: Pipeline) -> int:
    """What the optimizer holds for its weights; counts of steps apart."""
    states = pipeline.stage.optimizer.state.values()
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor) and value.ndim)


@dataclass(frozen=True)
class Trained:
    weights: dict[str, Tensor]
    state_bytes: int
    num_weights: int
    fixed_bytes: int


def train(rank: int, case: Case) -> Trained:
    chain, _, _ = build_dense_chain(WIDTHS)
    pipeline = connect(rank, case, chain)
    rate = None
    for step in batches():
        pipeline.step(*step[pipeline.mesh.replica])
        if case.scheduled:
            rate = rate or torch.optim.lr_scheduler.StepLR(pipeline.stage.optimizer, step_size=2, gamma=0.5)
            rate.step()
    pipeline.close()
    assert not pipeline.stage.executor.left_over()
    named = pipeline.named_parameters()
    return Trained(
        {key: value.detach().clone() for key, value in named.items()},
        state_bytes(pipeline),
        sum(value.numel() for value in named.values()),
        pipeline.fixed_bytes,
    )


HALVES = [("adamw", 1, None), ("adamw", None, 2), ("sgd", 2, 1), ("sgd", None, 1)]
"""(optimizer, ZeRO stage of the first half, of the second)."""


def join_parts(pipeline: Pipeline) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state from what each replica has of it."""
    everyone: list[dict] = [{}] * D
    dist.all_gather_object(everyone, pipeline.stage.zero.own_state(), group=pipeline.mesh.replicas)
    joined: dict[str, dict[str, Tensor]] = {}
    for name, parameter in pipeline.named_parameters().items():
        joined[name] = {key: value for key, value in everyone[0][name].items() if not isinstance(value, Fragment)}
        for key, part in [entry for own in everyone for entry in own[name].items()]:
            if isinstance(part, Fragment):
                assert part.shape == parameter.shape
                whole = joined[name].setdefault(key, torch.full(part.shape, torch.nan))
                whole.view(-1)[part.first : part.first + part.tensor.numel()] = part.tensor
    return joined


def run_steps(rank: int, case: Case, steps: slice, before: dict | None = None) -> dict[str, dict]:
    """Some of the steps, from where another run stopped if there was one; weights and state afterwards, by name."""
    chain, _, _ = build_dense_chain(WIDTHS)
    pipeline = connect(rank, case, chain)
    given = [step[pipeline.mesh.replica] for step in batches(6)]
    pipeline.connect(*given[0])
    named, optimizer, zero = pipeline.named_parameters(), pipeline.stage.optimizer, pipeline.stage.zero
    if before is not None:
        with torch.no_grad():
            for key, parameter in named.items():
                parameter.copy_(before["weights"][key])
        if zero is not None:
            zero.load_full_state(before["state"])
        else:
            for key, parameter in named.items():
                optimizer.state[parameter] = {name: value.clone() for name, value in before["state"][key].items()}
    for batch in given[steps]:
        pipeline.step(*batch)
    pipeline.close()
    state = {key: dict(optimizer.state[p]) for key, p in named.items()} if zero is None else join_parts(pipeline)
    return {"weights": {key: value.detach().clone() for key, value in named.items()}, "state": state}


def resume_all(rank: int) -> list[tuple[dict, dict]]:
    """For each of HALVES, six steps at once without sharding, and three and three."""
    found = []
    for optimizer, first, second in HALVES:
        case = Case(sliding(T, 2), optimizer)
        middle = run_steps(rank, replace(case, stage=first), slice(0, 3))
        end = run_steps(rank, replace(case, stage=second), slice(3, 6), middle)
        found.append((run_steps(rank, case, slice(0, 6)), end))
    return found


def refuse_all(rank: int) -> list[str]:
    messages = []
    chain, _, _ = build_dense_chain(WIDTHS)
    pipeline = connect(rank, replace(CASES["relays"], stage=1), chain)
    pipeline.connect(*batches(1)[0][pipeline.mesh.replica])
    for mistake in (
        lambda: pipeline.change_windows(sliding(T, 1)),
        lambda: pipeline.stage.zero.load_full_state({"blocks.9.weight": {}}),
        lambda: connect(rank, replace(CASES["relays"], stage=1), chain.double()),
    ):
        with pytest.raises(ValueError, match=r".") as caught:
            mistake()
        messages.append(str(caught.value))
    return messages


def train_beside_a_stage_without_weights(rank: int) -> list[dict[str, Tensor]]:
    """Its optimizer is not there, and the global norm must not wait for it in vain."""
    found = []
    for stage in (None, 1):
        torch.manual_seed(0)
        chain = Chain([nn.Linear(3, 3), nn.Tanh()], mean_squared_error)
        case = Case(backprop(2), "sgd", clip_norm=0.05, clip_scope="global", stage=stage)
        pipeline = connect(rank, case, chain, (1, 1))
        for step in batches(3):
            pipeline.step(*step[pipeline.mesh.replica])
        pipeline.close()
        found.append({key: value.detach().clone() for key, value in pipeline.named_parameters().items()})
    return found


def train_shipped(rank: int, folder: str) -> None:
    """The shipped configuration, smaller, by the training loop; it leaves the group at its end."""
    given = ["--config", str(ROOT / "configs/gpt_zero_small.yaml"), "--training.folder", folder, *TINY]
    file = ["--data_parallel.deepspeed_config", str(ROOT / "configs/deepspeed/zero1.json")]
    config, _ = ConfigParser([*given, *file], prog="test", description="").parse()
    train_as_configured(config, Launch(rank, config.num_ranks, rank), is_quiet=True)


@dataclass(frozen=True)
class Everything:
    trained: dict[tuple[str, int | None], Trained]
    resumed: list[tuple[dict, dict]]
    refused: list[str]
    beside: list[dict[str, Tensor]]


def run_everything(rank: int, folder: str) -> Everything:
    """All of it on the same ranks: importing DeepSpeed takes each of them seconds."""
    trained = {
        (name, stage): train(rank, replace(case, stage=stage)) for name, case in CASES.items() for stage in (None, 1, 2)
    }
    found = Everything(trained, resume_all(rank), refuse_all(rank), train_beside_a_stage_without_weights(rank))
    train_shipped(rank, folder)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shipped")


@pytest.fixture(scope="module")
def by_rank(folder: Path) -> list[Everything]:
    return run_local_ranks(run_everything, K * D, str(folder), timeout=250)


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor], message: str) -> None:
    """Within the rounding of float32: sums in another order, and a clipping factor that is multiplied, not divided."""
    assert set(found) == set(expected)
    for key, value in found.items():
        torch.testing.assert_close(
            value, expected[key], rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{message} {key}: {text}"
        )


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_weights_after_ten_steps_equal_the_unsharded_run(by_rank, name, stage):
    untrained = dict(build_dense_chain(WIDTHS)[0].named_parameters())
    for rank, results in enumerate(by_rank):
        found = results.trained[name, stage].weights
        assert_alike(found, results.trained[name, None].weights, f"rank {rank}")
        assert any((value - untrained[key]).abs().max() > 1e-3 for key, value in found.items())


@pytest.mark.parametrize("stage", [1, 2])
def test_each_replica_holds_half_of_the_optimizers_state(by_rank, stage):
    for results in by_rank:
        whole, part = results.trained["relays", None], results.trained["relays", stage]
        assert whole.state_bytes == 2 * 4 * whole.num_weights  # AdamW: two float32 for each weight
        padding = 2 * 4 * D  # parts are of equal size, a multiple of two elements
        assert whole.state_bytes / D <= part.state_bytes <= whole.state_bytes / D + padding
        # And DeepSpeed keeps a float32 copy of its part of the weights.
        counts = 4 * (len(whole.weights) - 1)  # of steps: one per parameter, or one for all
        flags = 4 * len(whole.weights)  # in the buckets of the unshared one: whether there is a gradient
        saved = whole.fixed_bytes - part.fixed_bytes - counts - flags
        assert saved == pytest.approx(whole.state_bytes / D - 4 * whole.num_weights / D, abs=2 * padding)


def test_the_norm_that_is_clipped_matters(by_rank):
    """Or the cases above would show nothing about clipping."""
    for results in by_rank:
        first = results.trained["clipped globally", 1].weights
        others = results.trained["split relays, scheduled", 1].weights
        assert any((first[key] - others[key]).abs().max() > 1e-2 for key in first)


@pytest.mark.parametrize("case", range(len(HALVES)), ids=[str(half) for half in HALVES])
def test_a_run_resumed_with_or_without_sharding_equals_one_that_was_not_interrupted(by_rank, case):
    for rank, results in enumerate(by_rank):
        whole, resumed = results.resumed[case]
        assert_alike(resumed["weights"], whole["weights"], f"rank {rank}")
        assert set(resumed["state"]) == set(whole["weights"])
        for key, state in whole["state"].items():
            assert_alike(resumed["state"][key], state, f"rank {rank} {key}")
            assert {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}[HALVES[case][0]] == set(
                state
            )


def test_a_stage_without_weights_needs_no_optimizer(by_rank):
    for rank, results in enumerate(by_rank):
        plain, sharded = results.beside
        assert len(plain) == (2 if rank < D else 0)
        assert_alike(sharded, plain, f"rank {rank}")


def test_what_zero_cannot_do_is_refused(by_rank):
    for results in by_rank:
        windows, state, dtype = results.refused
        assert windows == "windows cannot change while DeepSpeed shares the optimizer: it takes no new parameters"
        assert "the optimizer's state is of other parameters" in state
        assert dtype.endswith("weights in float32 here, got torch.float64; use training.precision float32")


def test_the_shipped_configuration_trains(by_rank, folder):
    for rank in range(K * D):
        steps = [line for line in read_metrics(folder, rank) if line["event"] == "step"]
        assert [line["step"] for line in steps] == [1, 2, 3]
        (boundary,) = steps[0]["losses"]
        assert steps[-1]["losses"][boundary] < steps[0]["losses"][boundary]


def test_a_single_replica_has_nobody_to_share_with():
    chain, _, _ = build_dense_chain(WIDTHS)
    mesh = build_mesh(Launch(), num_stages=1, timeout=TIMEOUT)
    with pytest.raises(ValueError, match="every stage has one; use 2 or more, or no ZeRO"):
        Pipeline(
            mesh,
            lay_out(backprop(T), (T,)),
            build_block=lambda t: chain.blocks[t],
            build_readout=lambda s: chain.readouts[str(s)],
            loss=chain.loss,
            optimizer=sgd,
            zero=ZeroSettings(1),
        )


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"optimizer": {"type": "Adam"}}, "zero.json sets 'optimizer', which optimizer decides here; leave it out"),
        ({"bf16": {"enabled": True}}, "'bf16', which training.precision decides here"),
        ({"zero_optimization": {"stage": 2}}, "sets zero_optimization.stage 2 but data_parallel.stage is 1"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offload_optimizer, which is not supported"),
        ({"zero_optimization": 3}, "zero_optimization must be a mapping, got 3"),
        ({"gradient_clipping": 1.0}, "sets gradient_clipping 1.0 but training.clip_norm is null; make them agree"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_settings_that_contradict_the_pipeline_are_refused(extra, message):
    with pytest.raises(ValueError, match=message):
        ZeroSettings(1, extra, "zero.json").build(clip_norm=None)


def test_settings_of_another_stage_or_file_are_refused(tmp_path):
    with pytest.raises(ValueError, match="ZeRO stage 3 is not supported; use 1 or 2"):
        ZeroSettings(3)
    with pytest.raises(ValueError, match="does not exist; the shipped ones are in configs/deepspeed/"):
        ZeroSettings.read(tmp_path / "none.json", 1)
    for content, message in (("{", "cannot be read"), ("[]", "holds a list")):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            ZeroSettings.read(tmp_path / "bad.json", 1)


def test_settings_of_the_file_reach_deepspeed_and_auto_is_filled_in():
    settings = ZeroSettings(
        2, {"gradient_clipping": "auto", "zero_optimization": {"stage": "auto", "reduce_bucket_size": 7}}
    )
    built = settings.build(clip_norm=0.5)
    assert built["gradient_clipping"] == 0.5
    assert built["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 7, "compute_grad_norm": True}
