"""What would not fit is refused by its true size."""

import dataclasses

import pytest

from mpc_dist.data import TextData
from mpc_dist.models import GPT
from mpc_dist.training import size
from mpc_dist.training.config import Config
from mpc_dist.training.planning import build_whole_chain
from mpc_dist.training.sections import ParallelConfig

CONFIG = Config(model=GPT(num_blocks=3, width=16, num_heads=2), data=TextData(context=16, max_bytes=30_000))


@pytest.mark.parametrize("blocks", [(0,), (1,), (1, 2), (0, 1, 2)], ids=str)
def test_the_size_is_that_of_the_weights_and_gradients_with_the_head_if_it_is_there(blocks, monkeypatch):
    task = CONFIG.data.load().task
    chain = build_whole_chain(CONFIG, task)
    parts = [*(chain.blocks[t] for t in blocks), *([chain.readouts["3"]] if 2 in blocks else [])]
    weights = sum(parameter.numel() for part in parts for parameter in part.parameters())
    seen = []
    monkeypatch.setattr(size, "check_memory", lambda what, num_bytes, remedy, limit: seen.append(num_bytes))
    size.check_size(CONFIG, task, blocks)
    batch, *by_block = seen
    assert batch == CONFIG.batch_size * 16 * 4
    assert by_block[-1] == 2 * 4 * weights  # float32, and its gradient
    assert len(by_block) == len(blocks)


def test_a_rank_is_refused_for_its_own_stage_only(monkeypatch):
    config = dataclasses.replace(CONFIG, parallel=ParallelConfig(stages=2, partition=(1, 2)))
    task = config.data.load().task
    named = []
    monkeypatch.setattr(size, "check_memory", lambda what, num_bytes, remedy, limit: named.append(what))
    for stage in range(2):
        size.check_stage_size(config, task, stage)
    weighed = [what for what in named if what.startswith("model:")]
    prefix = "model: the weights and gradients of blocks"
    assert weighed == [f"{prefix} 0..0", f"{prefix} 1..1", f"{prefix} 1..2"]
