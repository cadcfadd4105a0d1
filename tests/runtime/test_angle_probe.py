"""Angles over ranks are measured as the model is trained: in its precision, with what it draws."""

from datetime import timedelta

import pytest
import torch
from torch import nn

from mpc_dist.precision import Precision
from mpc_dist.readout import mean_squared_error
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch, build_mesh
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.schedule import lay_out
from mpc_dist.windows import sliding

OPTIONS = {"autocast": StageOptions(precision=Precision(torch.bfloat16)), "float32": StageOptions()}


def measure(rank: int, partition: tuple[int, ...], precision: str, replicas: int = 1) -> float:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3)) for _ in range(4)]
    readouts = {s: nn.Linear(16, 3) for s in range(1, 5)}
    batch = torch.randn(8, 16), torch.randn(8, 3)
    for _ in range(rank):
        torch.rand(7)  # the generators of ranks need not agree
    pipeline = Pipeline(
        build_mesh(
            Launch(rank, len(partition) * replicas, rank),
            num_stages=len(partition),
            num_replicas=replicas,
            timeout=timedelta(seconds=60),
        ),
        lay_out(sliding(4, 2), partition),
        build_block=blocks.__getitem__,
        build_readout=readouts.__getitem__,
        loss=mean_squared_error,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        num_microbatches=2,
        options=OPTIONS[precision],
    )
    pipeline.step(*batch)
    profile = pipeline.measure_angles([batch])
    pipeline.step(*batch)
    pipeline.close()
    return profile.cosine(sliding(4, 2))


@pytest.mark.parametrize("precision", OPTIONS)
def test_the_angle_does_not_depend_on_the_partition(precision):
    (alone,) = run_local_ranks(measure, 1, (4,), precision)
    assert 0.1 < alone < 0.99
    for partition in ((2, 2), (1, 2, 1)):
        for cosine in run_local_ranks(measure, len(partition), partition, precision):
            assert cosine == pytest.approx(alone, rel=1e-5)


def test_each_replica_measures_by_its_own_ranks():
    found = run_local_ranks(measure, 4, (2, 2), "float32", 2)
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert found[0] != found[1]  # replicas drop different features
