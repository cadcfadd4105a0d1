"""The report of `mpc-dist angles`."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from mpc_dist.profile import fit_line
from mpc_dist.report.angles import HorizonReport, format_bytes


def build_report(cosines: list[float], held: list[int]) -> HorizonReport:
    horizons = np.arange(1, len(cosines) + 1)
    fit = fit_line(dict(zip(horizons.tolist(), held, strict=True)))
    return HorizonReport("a model", horizons, np.array(cosines), np.array(held), fit, {"seed": 0})


def test_the_table_has_a_row_per_horizon_and_the_fitted_line():
    console = Console(width=100, file=io.StringIO())
    console.print(build_report([0.6, 0.8, 1.0], [2048, 4096, 6144]).table())
    rows = [line.split("│") for line in console.file.getvalue().splitlines() if "│" in line]
    cells = [[cell.strip() for cell in row[1:-1]] for row in rows]
    assert cells == [
        ["1", "0.6000", "6.40e-01", "2.00 KiB", "33.3%", "forward-forward"],
        ["2", "0.8000", "3.60e-01", "4.00 KiB", "66.7%", ""],
        ["3", "1.0000", "0.00e+00", "6.00 KiB", "100.0%", "back-propagation"],
    ]


def test_the_figure_draws_the_measured_points_on_the_axes_it_names():
    left, right = build_report([0.6, 0.8, 1.0], [2048, 4096, 6144]).figure().axes
    assert (left.get_xscale(), left.get_yscale()) == ("log", "log")
    np.testing.assert_allclose(left.lines[0].get_xdata(), [2, 1])
    np.testing.assert_allclose(left.lines[0].get_ydata(), [0.4, 0.2])
    np.testing.assert_allclose(right.lines[0].get_ydata(), [2, 4, 6])
    np.testing.assert_allclose(right.lines[1].get_ydata(), [2, 4, 6])
    assert "KiB" in right.get_ylabel()


def test_the_reference_line_has_slope_three():
    left, _ = build_report([0.9, 0.95, 0.99, 0.999, 1.0], [1] * 5).figure().axes
    x, y = left.lines[1].get_xdata(), left.lines[1].get_ydata()
    assert np.log(y[0] / y[-1]) / np.log(x[0] / x[-1]) == pytest.approx(3)


@pytest.mark.parametrize("cosines", [[1.0], [1.0, 1.0]])
def test_a_model_without_an_angle_still_has_a_figure(cosines, tmp_path):
    picture, _ = build_report(cosines, [10] * len(cosines)).write(tmp_path)
    assert picture.stat().st_size > 1000


def test_the_numbers_are_written_beside_the_figure(tmp_path):
    _, numbers = build_report([0.5, 1.0], [10, 20]).write(tmp_path)
    content = json.loads(numbers.read_text())
    assert content["cosines"] == [0.5, 1.0]
    assert content["peak_bytes"] == [10, 20]
    assert content["config"] == {"seed": 0}
    assert content["memory_fit"]["slope"] == pytest.approx(10)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 * 2**29, "1.50 GiB"), (2**52, "4096.00 TiB")],
)
def test_bytes_are_readable(size, text):
    assert format_bytes(size) == text
