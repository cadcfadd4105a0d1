"""Muon for hidden matrices and AdamW for the rest: two optimizers of torch, however the model is cut into stages."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mpc_dist.data import Batches
from mpc_dist.models import GPT, build_chain
from mpc_dist.profile.blocks import measure_blocks, without_allocating
from mpc_dist.task import Task
from mpc_dist.training.checkpoint import SavedCheckpoint
from mpc_dist.training.checkpoint_folder import folder_of, list_checkpoints
from mpc_dist.training.optimizer import are_on_gpu, build_optimizer, hidden_matrices
from mpc_dist.training.sections import OptimizerConfig
from tests.examples import build_dense_chain, build_example, draw_batch
from tests.models.hugging_face import build_whole
from tests.runtime.reference import reference_gradients
from tests.runtime.test_distributed import batches, connect, windows_for
from tests.training.local import parse, train_locally

ZERO = "--data_parallel.degree 2 --data_parallel.sharding deepspeed"
STAGES = (("blocks.0", "blocks.1", "readouts.2"), ("blocks.2", "blocks.3", "readouts.4"))
STEPS, LR, DECAY, CLIP = 20, 0.05, 0.1, 0.5
RUN = (
    "--model.name gpt --model.num_blocks 4 --model.width 16 --model.num_heads 2 --data.name text --data.context 16 "
    "--data.max_bytes 40000 --batch_size 4 --horizon.windows tumbling --horizon.size 2 --horizon.unit blocks "
    f"--optimizer.name muon --optimizer.lr {LR} --optimizer.weight_decay {DECAY} --training.eval_batches 1 "
    "--training.log_every 10 --training.precision float64 --device cpu --optimizer.scheduler StepLR "
    '--optimizer.scheduler_arguments {"step_size":4,"gamma":0.5}'
).split()


def matrices_of(chain: nn.Module) -> list[str]:
    """By their names: of a GPT's blocks, all but embeddings, norms and biases."""
    return [
        name
        for name, weight in chain.named_parameters()
        if name.startswith("blocks.") and weight.ndim == 2 and not name.endswith(("tokens.weight", "positions.weight"))
    ]


def two_optimizers(named: dict[str, nn.Parameter], matrices: list[str], lr: float) -> list[torch.optim.Optimizer]:
    hidden = [named[name] for name in matrices]
    others = [weight for name, weight in named.items() if name not in matrices]
    return [
        torch.optim.Muon(hidden, lr=lr, momentum=0.95, nesterov=True, weight_decay=DECAY),
        torch.optim.AdamW(others, lr=lr / 10, weight_decay=DECAY),
    ]


def saved_tensors(folder: Path) -> dict[str, Tensor]:
    """Weights and optimizer state of the last checkpoint."""
    saved = SavedCheckpoint(list_checkpoints(folder_of(folder))[-1])
    return saved.read_all([name for name in saved.described if not name.startswith("random.")])


def train_plainly(num_stages: int) -> dict[str, Tensor]:
    """What the run above should come to: two windows of two blocks; each stage is clipped by its own norm."""
    config = parse(RUN)
    data = config.data.load()
    chain = build_chain(config.model, data.task, boundaries=[2, 4], seed=config.seed).double()
    named = dict(chain.named_parameters())
    optimizers = two_optimizers(named, matrices_of(chain), LR)
    rates = [torch.optim.lr_scheduler.StepLR(one, 4, 0.5) for one in optimizers]
    given = Batches(data.train, batch_size=4, seed=config.seed)
    for _ in range(STEPS):
        state, labels = next(given)
        for half in (1, 2):
            state = state.detach()
            for block in chain.blocks[2 * half - 2 : 2 * half]:
                state = block(state)
            chain.loss_at(2 * half, state, labels).backward()
        for own in STAGES if num_stages == 2 else [STAGES[0] + STAGES[1]]:
            nn.utils.clip_grad_norm_([weight for name, weight in named.items() if name.startswith(own)], CLIP)
        for one in (*optimizers, *rates):
            one.step()
        chain.zero_grad()
    return {name: weight.detach() for name, weight in named.items()}


@pytest.mark.parametrize("num_stages", [1, 2])
def test_it_trains_as_two_plain_optimizers_do(num_stages, tmp_path: Path):
    stages = ["--parallel.stages", str(num_stages), "--training.clip_norm", str(CLIP)]
    train_locally([*RUN, *stages, "--training.steps", str(STEPS)], tmp_path)
    found = saved_tensors(tmp_path)
    for name, weight in train_plainly(num_stages).items():
        torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-9, msg=name)
    buffers = {name.removeprefix("optimizer.") for name in found if name.endswith(".momentum_buffer")}
    averages = {name.removeprefix("optimizer.") for name in found if name.endswith(".exp_avg")}
    matrices = {name.removesuffix(".momentum_buffer") for name in buffers}
    assert len(matrices) == 4 * 4
    assert averages == {f"{n}.exp_avg" for n in found if n.startswith(("blocks.", "readouts."))} - {
        f"{n}.exp_avg" for n in matrices
    }


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)], ids=["1 -> 2 stages", "2 -> 1 stages"])
def test_another_number_of_stages_goes_on_bit_for_bit(before, after, tmp_path: Path):
    whole = train_locally([*RUN, "--training.steps", "6"], tmp_path / "whole")
    for stages, steps in ((before, "3"), (after, "6")):
        train_locally([*RUN, "--parallel.stages", str(stages), "--training.steps", steps], tmp_path / "parts")
    expected, found = saved_tensors(tmp_path / "whole"), saved_tensors(tmp_path / "parts")
    assert whole.num_ranks == 1
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.usefixtures("float64")
def test_heads_that_join_at_a_change_of_windows_are_adamws():
    build = partial(build_dense_chain, [3, 4, 5, 4, 3, 4, 3])
    chain, plain = build()[0], build()[0]
    config = OptimizerConfig("muon", lr=LR, weight_decay=DECAY)
    named = dict(plain.named_parameters())
    optimizers = two_optimizers(named, matrices_of(plain), LR)
    factory = partial(build_optimizer, config, blocks=chain.blocks)
    names, given = ("backprop", "tumbling 2", "tumbling 3"), iter(batches() * 2)
    pipeline = connect(0, (6,), windows_for(names[0], (6,)), chain, optimizer=factory, num_microbatches=3)
    for name in names:
        pipeline.change_windows(windows_for(name, (6,)))
        for _ in range(3):
            ((inputs, labels),) = next(given)
            pipeline.step(inputs, labels)
            plain.zero_grad()
            for key, gradient in reference_gradients(plain, inputs, labels, windows_for(name, (6,)), 3).items():
                named[key].grad = gradient
            for one in optimizers:
                one.step()
    for key, weight in chain.named_parameters():
        torch.testing.assert_close(weight, named[key], rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.parametrize("name", ["gpt", "resnet_cifar", "gpt2", "llama", "vit"])
def test_hidden_matrices_are_those_that_map_states(name):
    blocks = build_example(name)[0].blocks if name in ("gpt", "resnet_cifar") else build_whole(name).base_model
    hidden = set(hidden_matrices(blocks))
    embeddings = ("tokens.weight", "positions.weight", "wte.weight", "wpe.weight", "embed_tokens.weight")
    for key, weight in blocks.named_parameters():
        assert (weight in hidden) == (weight.ndim == 2 and not key.endswith(embeddings)), key
    assert bool(hidden) != (name == "resnet_cifar")


def test_the_planner_counts_one_buffer_for_each_hidden_matrix():
    task = Task("tokens", (7,), 11)
    chain = build_chain(GPT(num_blocks=2, width=16, num_heads=2), task)
    inputs, labels = draw_batch(task)
    before = copy.deepcopy(chain.state_dict())
    factory = partial(build_optimizer, OptimizerConfig("muon", lr=LR, weight_decay=DECAY), blocks=chain.blocks)
    found = measure_blocks(chain, inputs, labels, factory, repeats=1)
    hidden = {parameter for block in chain.blocks for parameter in hidden_matrices(block)}
    parts = (*chain.blocks, *chain.readouts.values())
    for costs, part in zip((*found.blocks, *found.readouts), parts, strict=True):
        sizes = [p.nbytes if p in hidden else 2 * p.nbytes + 4 for p in part.parameters()]
        assert costs.optimizer_bytes == sum(sizes)
    for name, value in chain.state_dict().items():
        assert torch.equal(value, before[name]), f"measuring moved {name}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--data_parallel.degree 2 --data_parallel.sharding deepspeed --training.precision float32",
            "muon updates whole matrices",
        ),
        ("--optimizer.name sgd --optimizer.adamw_lr 0.1", "adamw_lr is for optimizer.name muon, got sgd"),
        ("--optimizer.adamw_lr -1", "optimizer.adamw_lr"),
    ],
)
def test_what_muon_cannot_do_is_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse([*RUN, *arguments.split()])
    assert "\n" not in str(caught.value)


def test_one_kernel_updates_all_weights_only_if_all_are_on_a_gpu():
    with without_allocating():
        here, there = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, device="cuda"))
        assert are_on_gpu([there, there])
        assert not are_on_gpu([there, here])
        optimizers = {
            name: build_optimizer(OptimizerConfig(name), [here], blocks=[]) for name in ("adamw", "sgd", "muon")
        }
    for name, optimizer in optimizers.items():
        assert not any(group.get("fused") for group in optimizer.param_groups), name
