"""The paper's regression tasks."""

import math

import numpy as np
import pytest
import torch

from mpc_dist.data import Batches, Dataset, LinearData, Split, TrigonometricData


def all_of(split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    return next(Batches(split, batch_size=split.num_samples, seed=0, shuffle=False))


def same(left: Dataset, right: Dataset) -> bool:
    return all(
        torch.equal(a, b)
        for one, other in ((left.train, right.train), (left.test, right.test))
        for a, b in zip(all_of(one), all_of(other), strict=True)
    )


def test_linear_labels_are_one_matrix_times_gaussian_inputs_in_both_splits():
    data = LinearData(num_train=4000, num_test=50).load()
    x, y = (part.double() for part in all_of(data.train))
    matrix = torch.linalg.lstsq(x, y).solution
    torch.testing.assert_close(x @ matrix, y, rtol=1e-4, atol=1e-4)  # samples are stored in float32
    test_x, test_y = (part.double() for part in all_of(data.test))
    torch.testing.assert_close(test_x @ matrix, test_y, rtol=1e-4, atol=1e-4)
    # 40,000 Gaussian numbers: mean within 5 standard errors of 0, variance of 1.
    assert abs(x.mean()) < 5 / 200
    assert abs(x.var() - 1) < 5 * math.sqrt(2) / 200
    assert 0.5 < matrix.std() < 1.5


def test_trigonometric_labels_are_the_four_waves_times_one_noise_per_sample():
    x, y = (part.double() for part in all_of(TrigonometricData(num_train=20_000).load().train))
    assert x.min() >= -2
    assert x.max() <= 2
    assert x.std() == pytest.approx(4 / math.sqrt(12), rel=0.02)
    waves = torch.cat(
        [torch.cos(np.pi * x), torch.sin(np.pi * x), torch.cos(2 * np.pi * x), torch.sin(2 * np.pi * x)], 1
    )
    factor = (y * waves).sum(1, keepdim=True) / waves.square().sum(1, keepdim=True)
    torch.testing.assert_close(y, factor * waves, rtol=1e-4, atol=1e-4)  # one factor explains all four components
    assert factor.mean() == pytest.approx(1, abs=0.01)
    assert factor.var() == pytest.approx(0.03, rel=0.05)


def test_without_noise_the_labels_lie_on_the_waves():
    _, y = all_of(TrigonometricData(num_train=100, noise_variance=0.0).load().train)
    torch.testing.assert_close(y.square().sum(1), torch.full((100,), 2.0))


@pytest.mark.parametrize("source", [LinearData, TrigonometricData])
def test_samples_follow_from_the_seed_and_splits_differ(source):
    first, again, other = (source(num_train=50, num_test=50, seed=seed).load() for seed in (1, 1, 2))
    assert same(first, again)
    assert not same(first, other)
    assert not torch.equal(all_of(first.train)[0], all_of(first.test)[0])


def test_the_papers_sizes_are_the_defaults():
    assert LinearData().load().train.num_samples == 10_000
    assert TrigonometricData().load().train.num_samples == 100_000


@pytest.mark.parametrize(
    ("source", "field", "value"),
    [
        (LinearData, "num_train", 0),
        (LinearData, "dimension", 0),
        (LinearData, "seed", -1),
        (TrigonometricData, "num_test", 0),
        (TrigonometricData, "noise_variance", -0.1),
    ],
)
def test_bad_settings_are_refused(source, field, value):
    with pytest.raises(ValueError, match=rf"data\.{field} {value} is out of range"):
        source(**{field: value})
