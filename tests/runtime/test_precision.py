"""Losses and scores in float32, whatever the forwards compute in: the numbers of torch.autocast."""

import pytest
import torch
import torch.nn.functional as F

from mpc_dist.models import GPT, build_chain
from mpc_dist.precision import Precision
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.schedule import build_schedule, lay_out
from mpc_dist.windows import backprop, sliding
from tests.examples import TOKENS, draw_batch
from tests.runtime.reference import KeepGradients


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("windows", [backprop(3), sliding(3, 1)])
def test_losses_scores_and_gradients_are_those_of_torch_autocast(dtype, windows):
    chain = build_chain(GPT(num_blocks=3, width=32, num_heads=2), TOKENS)
    tokens, labels = draw_batch(TOKENS, batch_size=8)
    layout = lay_out(windows, (1, 2))
    pipeline = InProcessPipeline(
        chain,
        layout,
        build_schedule(layout, 2),
        optimizer=KeepGradients,
        options=StageOptions(precision=Precision(dtype)),
    )
    records = pipeline.step(tokens, labels)
    scores = pipeline.evaluate(tokens, labels)
    expected: dict[int, list[float]] = {s: [] for s in scores}
    for x, y in zip(tokens.chunk(2), labels.chunk(2), strict=True):
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
            state = x
            for boundary, block in enumerate(chain.blocks, start=1):
                state = block(state)
                if boundary in expected:
                    logits = chain.readouts[str(boundary)](state)
                    expected[boundary].append(float(F.cross_entropy(logits.flatten(0, 1), y.flatten())))
                if boundary == 1:  # to the second rank
                    state = state.to(dtype).float()
    losses = {layout.blocks[s - 1].stop: v for record in records for s, v in record.losses.items()}
    assert set(losses) == set(expected)
    for boundary, wanted in expected.items():
        assert all(loss.dtype == torch.float32 for loss in losses[boundary])
        # Sums of float32 terms; bfloat16 would be off by up to 1 / 64 here.
        assert [float(loss) for loss in losses[boundary]] == pytest.approx(wanted, rel=1e-6)
        assert scores[boundary].loss == pytest.approx(sum(wanted) / 2, rel=1e-6)
