"""A linear model of a chain in training: which errors at its boundaries die out, stay or grow, for any windows.

In function space a block adds u(t) to the state, x(s) = x(0) + sum of u(t) over t < s, and the error at boundary s is
e(s) = x(s) - y. Under gradient flow with targets (s', w) of block t and its tangent kernel K(t),

    du(t)/dtau = -K(t) sum w e(s')      so      de(s)/dtau = -(A e)(s),    A[s, s'] = sum over t < s of K(t) w[t, s']

An error along an eigenvector of A dies out at the rate of its eigenvalue's real part. With h = 1 and with tumbling
windows A is block lower triangular, with sums of kernels on its diagonal: no eigenvalue has a negative real part,
whatever the kernels are. Sliding windows with 1 < h < T - 1 couple neighbours both ways: eigenvalues at zero come in
Jordan chains, along which errors grow like a power of time, and unlike kernels push some of them below zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from mpc_dist.study.cell import Result
from mpc_dist.study.training_cell import WindowChoice, keep_digits
from mpc_dist.windows import Windows

Matrix = NDArray[np.float64]
NUM_OUTPUTS = 12
"""Outputs of a boundary over all samples, in the simulation with unlike kernels."""
STEPS = 1000
RATE = 0.01
"""Learning rate of a simulated step; kernels have a mean eigenvalue of 1."""


def read_errors(windows: Windows) -> list[int]:
    """The boundaries whose errors act on any block; errors elsewhere follow and act on nothing."""
    return list(windows.readouts)


def build_dynamics(windows: Windows, kernels: Sequence[Matrix], *, boundaries: Sequence[int]) -> Matrix:
    """A, restricted to these boundaries; `kernels[t]` is K(t)."""
    size = len(kernels[0])
    place = {boundary: slice(i * size, (i + 1) * size) for i, boundary in enumerate(boundaries)}
    matrix = np.zeros((len(boundaries) * size,) * 2)
    for block, aims in enumerate(windows.targets):
        for aimed, weight in aims:
            for boundary in boundaries:
                if boundary > block and aimed in place:
                    matrix[place[boundary], place[aimed]] += weight * kernels[block]
    return matrix


def longest_chain_at_zero(matrix: Matrix) -> int:
    """The size of the largest Jordan block of eigenvalue 0, in exact arithmetic; 0: it is no eigenvalue.

    Errors along a chain of k grow like time to the power k - 1. Floating point cannot tell such a block from small
    eigenvalues, so the entries are taken as fractions.
    """
    exact = [[Fraction(value).limit_denominator(10_000) for value in row] for row in matrix.tolist()]
    rank, power, length = len(exact), exact, 0
    while (smaller := _rank(power)) < rank:
        rank, length = smaller, length + 1
        power = _multiply(power, exact)
    return length


def _multiply(left: list[list[Fraction]], right: list[list[Fraction]]) -> list[list[Fraction]]:
    columns = list(zip(*right, strict=True))
    return [[sum((a * b for a, b in zip(row, column, strict=True)), Fraction()) for column in columns] for row in left]


def _rank(matrix: list[list[Fraction]]) -> int:
    rows, rank = [row[:] for row in matrix], 0
    for column in range(len(rows[0])):
        pivot = next((i for i in range(rank, len(rows)) if rows[i][column]), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        for i in range(rank + 1, len(rows)):
            if rows[i][column]:
                factor = rows[i][column] / rows[rank][column]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[rank], strict=True)]
        rank += 1
    return rank


def draw_kernels(num_blocks: int, rng: np.random.Generator) -> list[Matrix]:
    """Unlike kernels: positive semi-definite matrices of full rank with mean the identity."""
    features = rng.standard_normal((num_blocks, NUM_OUTPUTS, NUM_OUTPUTS)) / NUM_OUTPUTS**0.5
    return [one @ one.T for one in features]


@dataclass(frozen=True)
class ModesCell:
    """The modes of one chain."""

    windows: WindowChoice
    num_blocks: int
    num_draws: int
    """Of unlike kernels."""

    def run(self) -> Result:
        """Eigenvalues with like kernels; least damping with unlike ones, and how far the errors drift then."""
        windows = self.windows.build(self.num_blocks)
        alike = build_dynamics(windows, [np.eye(1)] * self.num_blocks, boundaries=read_errors(windows))
        least, drift = [], []
        for draw in range(self.num_draws):
            rng = np.random.default_rng(draw)
            kernels = draw_kernels(self.num_blocks, rng)
            read = build_dynamics(windows, kernels, boundaries=read_errors(windows))
            values = np.linalg.eigvals(read)
            least.append(float(values.real.min() / np.abs(values).max()))
            drift.append(simulate_drift(windows, kernels, rng))
        values = np.linalg.eigvals(alike)
        return {
            "chain": longest_chain_at_zero(alike),
            "eigenvalues": [[keep_digits(float(v.real)), keep_digits(float(v.imag))] for v in values],
            "least": [keep_digits(value) for value in least],
            "drift": [keep_digits(value) for value in drift],
        }


def simulate_drift(windows: Windows, kernels: Sequence[Matrix], rng: np.random.Generator) -> float:
    """The size of the errors that are read, after training with gradient noise that moves every block at every step.

    Noise feeds every mode: damped ones settle at a size that depends on the rate alone, undamped ones go on growing.
    """
    boundaries = read_errors(windows)
    matrix = build_dynamics(windows, kernels, boundaries=boundaries)
    size = len(kernels[0])
    errors = np.zeros(len(matrix))
    for _ in range(STEPS):
        moved = rng.standard_normal((windows.num_blocks, size)).cumsum(axis=0)
        noise = moved[[boundary - 1 for boundary in boundaries]].ravel()
        errors = errors - RATE * (matrix @ errors) + RATE * noise
    return float(np.sqrt(np.square(errors).mean()))
