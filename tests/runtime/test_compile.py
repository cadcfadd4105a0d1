"""Compiled blocks: the weights that the blocks as written come to, by few graphs that blocks and steps share."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from mpc_dist.models import Chain
from mpc_dist.precision import Precision
from mpc_dist.readout import mean_squared_error
from mpc_dist.runtime.branches import BranchFinder
from mpc_dist.runtime.compiled import compile_blocks
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.schedule import build_schedule, lay_out
from mpc_dist.windows import Windows, backprop, sliding, tumbling
from tests.runtime.test_distributed import connect
from tests.training.local import parse, train_rank

# Inductor's imports and what it calls of torch itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
T, WIDTH, M, STEPS, ROUNDING = 4, 6, 2, 3, 1e-6
NUM_GRAPHS = 2
"""Of all blocks of all cases: trained and evaluated."""


class Residual(nn.Module):
    """A block that drops features."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.contract = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, state: Tensor) -> Tensor:
        return state + F.dropout(self.contract(F.gelu(self.expand(state))), 0.3, self.training)


def build() -> Chain:
    torch.manual_seed(1)
    return Chain([Residual() for _ in range(T)], mean_squared_error, {s: nn.Linear(WIDTH, 3) for s in range(1, T + 1)})


def draw_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(4 * M, WIDTH, generator=generator), torch.randn(4 * M, 3, generator=generator)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2)


def test_blocks_can_be_compiled_in_a_process_that_has_imported_nothing_else():
    script = "import torch, mpc_dist.runtime.compiled as own; own.compile_blocks([torch.nn.Linear(2, 2)])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


CASES: dict[str, tuple[Windows, bool, bool]] = {
    "horizon 1": (sliding(T, 1), False, False),
    "relays": (sliding(T, 2), False, False),
    "relays, split": (sliding(T, 2), True, False),
    "back-propagation, split": (backprop(T), True, False),
    "recompute": (backprop(T), False, True),
    "recompute, split, relays": (sliding(T, 3), True, True),
}
"""Windows, whether backwards come in halves, whether blocks run again."""


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What inductor keeps goes away with the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        torch._dynamo.reset()
        counters.clear()
        yield
        torch._dynamo.reset()


def train(chain: Chain, windows: Windows, options: StageOptions, *, split: bool) -> list[float]:
    """Scores after some steps on two stages."""
    layout = lay_out(windows, (1, T - 1))
    pipeline = InProcessPipeline(chain, layout, build_schedule(layout, M, split=split), optimizer=sgd, options=options)
    for _ in range(STEPS):
        pipeline.step(*draw_batch())
    return [score.loss for score in pipeline.evaluate(*draw_batch()).values()]


def assert_close(found: nn.Module, expected: nn.Module) -> None:
    weights = dict(expected.named_parameters())
    for name, value in found.named_parameters():
        torch.testing.assert_close(value, weights[name], rtol=ROUNDING, atol=ROUNDING, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_compiled_blocks_train_as_they_are_written(case: str):
    windows, split, recompute = CASES[case]
    options = StageOptions(seed=3, checkpoint=recompute)
    written, compiled = build(), build()
    expected = train(written, windows, options, split=split)
    found = train(compiled, windows, replace(options, compile=True), split=split)
    assert_close(compiled, written)
    assert found == pytest.approx(expected, rel=ROUNDING)
    assert compiled.state_dict().keys() == written.state_dict().keys()
    # No graph knows of a block's index, of a micro-batch or of a step, and modes and windows share them.
    assert counters["stats"]["unique_graphs"] == NUM_GRAPHS


def test_a_compiled_block_gives_all_gradients_in_the_input_half():
    """To ask it again in the weight half would repeat the whole backward."""
    block = build().blocks[0]
    compile_blocks([block])
    source = torch.randn(4, WIDTH, requires_grad=True)
    edges, rounds, direct = BranchFinder([*block.parameters()]).find(block(source), source)
    assert (edges, rounds) == ([], ())
    assert set(direct) == set(block.parameters())


@pytest.mark.slow
def test_a_precision_of_two_bytes_is_compiled_too():
    """Fused operations do not round in between, so that it is near only, by the bits that bfloat16 has."""
    options = StageOptions(seed=3, precision=Precision(torch.bfloat16))
    written, compiled = build(), build()
    expected = train(written, sliding(T, 2), options, split=True)
    found = train(compiled, sliding(T, 2), replace(options, compile=True), split=True)
    assert found == pytest.approx(expected, rel=2**-8)
    for (name, value), weight in zip(compiled.named_parameters(), written.parameters(), strict=True):
        assert (value - weight).norm() <= 2**-8 * weight.norm(), name


def test_a_backward_on_another_thread_may_use_a_graph_twice_too():
    """As on GPUs, where autograd has threads of its own."""
    chain = build()
    options = StageOptions(seed=3, compile=True)
    train(chain, sliding(T, 1), options, split=False)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(train, chain, sliding(T, 2), replace(options, compile=False), split=True).result()


def change_windows(rank: int, partition: tuple[int, ...], *, compile: bool) -> tuple[dict[str, Tensor], int]:  # noqa: A002
    counters.clear()
    chain = build()
    settings = {"optimizer": sgd, "num_microbatches": M, "options": StageOptions(seed=3, compile=compile)}
    pipeline = connect(rank, partition, tumbling(T, 2), chain, **settings)
    for windows in (tumbling(T, 2), sliding(T, 2), backprop(T)):
        pipeline.change_windows(windows)
        for _ in range(2):
            pipeline.step(*draw_batch())
        pipeline.evaluate(*draw_batch())
    pipeline.close()
    named = {name: value.detach().clone() for name, value in pipeline.named_parameters().items()}
    return named, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("partition", [pytest.param((T,), marks=pytest.mark.slow), (2, 2)], ids=str)
def test_windows_may_change_and_ranks_share_what_is_compiled(partition: tuple[int, ...]):
    by_rank = run_local_ranks(partial(change_windows, partition=partition, compile=True), len(partition))
    expected, none = change_windows(0, (T,), compile=False)
    assert none == 0
    for weights, num_graphs in by_rank:
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], rtol=ROUNDING, atol=ROUNDING, msg=name)
        assert num_graphs == NUM_GRAPHS  # the start-up check has none of its own


RUN = (
    "--model.name res_mlp --model.num_blocks 1 --model.width 4 --data.name trigonometric --data.num_train 40 "
    "--data.num_test 8 --batch_size 8 --training.steps 2 --training.eval_batches 1 --training.compile true --device cpu"
).split()


def test_without_a_compiler_a_run_ends_in_one_line_before_it_begins(tmp_path: Path):
    from torch._inductor import config, cpp_builder

    message = r"needs a C\+\+ compiler, and there is none; install g\+\+"
    cpp_builder.cpp_compiler_search.cache_clear()
    with config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(ValueError, match=message) as caught:
        train_rank(0, parse([*RUN, "--training.folder", str(tmp_path / "run")]))
    cpp_builder.cpp_compiler_search.cache_clear()
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_run_compiles_if_it_is_told_to(tmp_path: Path):
    counters.clear()
    train_rank(0, parse([*RUN, "--training.folder", str(tmp_path / "run")]))
    assert counters["stats"]["unique_graphs"] > 0
