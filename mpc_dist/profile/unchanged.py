"""Measuring leaves a model as it was: puts back what forward passes change."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put back the buffers (batch-norm statistics) and the random state at the end."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
