"""`make gpu-check` on two gloo ranks: the script that waits for GPUs works, and no check that fails hides another."""

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from mpc_dist.bench.gpu_check import Check, Finding, Largest, run_checks, write_page
from mpc_dist.bench.gpu_ranks import Setting
from mpc_dist.bench.gpu_steps import list_checks
from mpc_dist.runtime.local import run_local_ranks
from tests.conftest import ROOT

NAMES = [check.name for check in list_checks(Setting("cpu", True, ROOT))]

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def check(folder: Path, *names: str) -> tuple[int, dict[str, str]]:
    """The exit code, and the verdicts of the page."""
    options = ["--device", "cpu", "--quick", "--out", str(folder), "--only", *names]
    done = subprocess.run(
        [sys.executable, "launch/gpu_check.py", *options], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    page = (folder / "report.md").read_text()
    assert page in done.stdout, done.stderr
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.count(" | ") == 4]
    return done.returncode, {row[0]: row[2].strip("*") for row in rows[1:]}


def test_the_checks_hold_on_the_cpu(tmp_path: Path):
    names = [name for name in NAMES if name not in ("compile", "compute")]
    code, verdicts = check(tmp_path, *names)
    assert verdicts == dict.fromkeys(names, "held") | {"tests": "not run"}
    assert code == 0


@pytest.mark.slow
def test_a_speed_is_a_figure_of_the_machine(tmp_path: Path):
    code, verdicts = check(tmp_path, "compute")
    assert (code, verdicts) in [(0, {"compute": "held"}), (1, {"compute": "did not hold"})]
    assert "1F1B / this" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_what_is_compiled_holds_on_the_cpu(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    assert check(tmp_path, "compile") == (0, {"compile": "held"})


def sleep(rank: int) -> None:
    time.sleep(600 * rank)


def give_up(rank: int) -> None:
    raise RuntimeError(f"rank {rank} is out of order")


def look(function) -> Finding:
    run_local_ranks(function, 2, timeout=4)
    return Finding("held", "both ranks came back")


def test_a_check_that_hangs_or_fails_hides_no_other():
    checks = [Check(one.__name__, "returns", partial(look, one)) for one in (sleep, give_up, print)]
    said: list[str] = []
    outcomes = run_checks(checks, said.append)
    assert [one.finding.verdict for one in outcomes] == ["did not hold", "did not hold", "held"]
    assert "did not finish in time" in outcomes[0].finding.reason
    assert outcomes[1].finding.reason.endswith("is out of order")
    page = write_page(outcomes, ["here"])
    for one in outcomes:
        assert f"| {one.check.name} | returns | **{one.finding.verdict}** | {one.finding.reason} |" in page
    assert "Traceback" in page  # among the figures


@pytest.mark.parametrize(("value", "verdict"), [(0.1, "held"), (0.3, "did not hold"), (float("nan"), "did not hold")])
def test_the_largest_difference_decides(value, verdict):
    largest = Largest(0.2)
    for where, one in (("here", 0.05), ("there", value), ("elsewhere", 0.01)):
        largest.add(where, one)
    finding = largest.conclude("weights")
    assert finding.verdict == verdict
    assert "(there)" in finding.reason
    assert len(finding.figures) == 3


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are two GPUs")
def test_without_two_gpus_what_needs_them_is_not_run():
    _, *checks = list_checks(Setting("cuda", True, ROOT))
    for outcome in run_checks(checks, lambda _: None):
        assert outcome.finding.verdict == "not run"
        assert outcome.finding.reason == f"needs 2 GPUs, this machine has {torch.cuda.device_count()}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "speed"], "--only speed: no such check; use some of tests, gradients"),
        pytest.param(["--device", "cuda"], "torch finds no GPU here", marks=WITHOUT_GPU),
    ],
)
def test_what_cannot_be_checked_is_said_in_one_line(options, message, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "launch/gpu_check.py", *options, "--out", str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()
