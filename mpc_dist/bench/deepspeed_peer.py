"""DeepSpeed's pipeline as a peer in a benchmark; it needs the `deepspeed` extra."""

import itertools
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from mpc_dist.bench.peers import Step

DEEPSPEED = "deepspeed-PipelineModule"


def has_deepspeed() -> bool:
    """Whether DeepSpeed is installed."""
    return find_spec("deepspeed") is not None


def build_deepspeed(
    num_ranks: int,
    num_microbatches: int,
    layers: Sequence[nn.Module],
    inputs: Tensor,
    labels: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    learning_rate: float,
) -> Step:
    """A function that makes one optimizer step of its PipelineModule; the layers are spread evenly over the ranks."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    model = PipelineModule(list(layers), num_stages=num_ranks, loss_fn=loss, partition_method="uniform")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    settings = {
        "train_micro_batch_size_per_gpu": len(inputs) // num_microbatches,
        "gradient_accumulation_steps": num_microbatches,
        "gradient_clipping": 0.0,  # it clips to 1.0 unless told otherwise
        "steps_per_print": 2**31,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    parts = itertools.cycle(list(zip(inputs.chunk(num_microbatches), labels.chunk(num_microbatches), strict=True)))

    def step() -> None:
        engine.train_batch(parts)

    return step
