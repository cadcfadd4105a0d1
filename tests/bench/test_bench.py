"""Benchmarks run end to end on a tiny setting; their numbers are figures, not tests."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpc_dist.bench import actions
from mpc_dist.bench.emulate import Pace, SleepingBlock
from mpc_dist.bench.hosts import why_not
from mpc_dist.bench.rows import Row
from mpc_dist.bench.scale import bench_scale
from mpc_dist.bench.schedule import parse_windows, speed_ups
from mpc_dist.windows import backprop, sliding, tumbling
from tests.conftest import ROOT


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "launch/bench.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_the_schedule_benchmark_reports_ours_and_torchs(tmp_path: Path):
    out = tmp_path / "rows.json"
    options = "schedule --stages 4 --microbatches 4 --f 0.002 --repeats 1 --seconds 0.05 --json".split()
    done = run(*options, str(out))
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    fields = {"system", "windows", "split", "stages", "microbatches", "step_seconds", "spread", "repeats"}
    assert all(fields <= set(row) for row in rows)
    systems = {row["system"] for row in rows}
    assert {"mpc_dist", "torch-GPipe", "torch-1F1B", "torch-InterleavedZeroBubble", "torch-ZBV"} <= systems
    assert {(row["windows"], row["split"]) for row in rows if row["system"] == "mpc_dist"} >= {
        ("sliding:1", False),
        ("sliding:2", True),
        ("tumbling:4", True),
        ("backprop", False),
    }
    # Compute is emulated by sleeping, so no step can be shorter than its busiest rank's sleep.
    for row in rows:
        assert row["step_seconds"] > 0.9 * 3 * 4 * 0.002


def test_the_angle_benchmark_compares_ways_that_agree(tmp_path: Path):
    out = tmp_path / "rows.json"
    done = run(*"angles --blocks 3 --width 16 --context 8 --batch-size 2 --repeats 2 --json".split(), str(out))
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())[0]["system"] == "one pass"


@pytest.mark.slow
def test_the_compile_benchmark_pays_for_the_compiler_in_the_first_step(tmp_path: Path):
    out = tmp_path / "rows.json"
    done = run(*"compile --blocks 2 --width 8 --context 4 --repeats 1 --json".split(), str(out))
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert {row["system"] for row in rows} == {"as written", "compiled"}
    for row in rows:
        assert (row["first step s"] > 10 * row["step_seconds"]) or row["system"] == "as written"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("angles --blocks 0", "model.num_blocks 0 is out of range"),
        ("schedule --stages 4 --costs 1,2", "--costs has 2 entries for 4 stages"),
    ],
)
def test_bad_settings_are_said_in_one_line(arguments, message):
    done = run(*arguments.split())
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_compute_benchmark_compares_with_torch_and_one_process(tmp_path: Path):
    out = tmp_path / "rows.json"
    options = "compute --blocks 4 --width 16 --batch-size 16 --microbatches 2 --repeats 2 --json".split()
    done = run(*options, str(out))
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert {(row["system"], row["windows"]) for row in rows if "deepspeed" not in row["system"]} == {
        ("mpc_dist", "sliding:1"),
        ("mpc_dist", "backprop"),
        ("torch-1F1B", "backprop"),
        ("one-process", "backprop"),
    }


def test_the_action_benchmark_times_every_action_and_what_torch_takes_of_it(monkeypatch):
    monkeypatch.setattr(actions, "STEPS", 3)
    ours, theirs = actions.time_actions(), actions.time_torch_alone()
    assert set(ours) == set(actions.KINDS)
    assert set(theirs) == set(actions.KINDS) - {"update"}
    assert all(seconds > 0 for seconds in (*ours.values(), theirs["forward"], theirs["input_half"]))
    assert theirs["weight_half"] == theirs["backward"] - theirs["input_half"]


def test_the_memory_benchmark_counts_more_for_longer_horizons(tmp_path: Path):
    out = tmp_path / "rows.json"
    done = run(*"memory --stages 4 --microbatches 6 --width 64 --context 16 --json".split(), str(out))
    assert done.returncode == 0, done.stderr
    peaks = [row["peak MiB, worst rank"] for row in json.loads(out.read_text())]
    assert peaks == sorted(peaks)
    assert peaks[-1] > 2 * peaks[0]
    assert [row["in flight"] for row in json.loads(out.read_text())][-1] == 4


@pytest.mark.slow
def test_the_checkpoint_benchmark_saves_and_compares(tmp_path: Path):
    out = tmp_path / "rows.json"
    options = "checkpoint --stages 2 --f 0.001 --megabytes 1 --every 2 --steps 6 --repeats 1 --json".split()
    done = run(*options, str(out))
    assert done.returncode == 0, done.stderr
    without, saving = json.loads(out.read_text())
    assert (without["system"], saving["system"]) == ("without saving", "saving")
    assert saving["ratio"] == pytest.approx(saving["step_seconds"] / without["step_seconds"])
    assert 0 < saving["median stall ms"] <= saving["worst ms"]


def test_simulated_steps_of_horizons_do_not_grow_with_the_stages():
    rows = bench_scale([4, 16], [("sliding:1", False), ("sliding:2", True), ("backprop", False)], 8)
    times = {(row.windows, row.stages): row.step_seconds for row in rows}
    assert times["sliding:1", 4] == times["sliding:1", 16] == 24
    assert times["sliding:2", 4] == times["sliding:2", 16] == 32
    assert times["backprop", 16] - times["backprop", 4] == 3 * 12


def test_an_emulated_block_takes_its_time_in_each_pass():
    import time

    import torch

    block, pace = SleepingBlock(Pace(0.02), 4), 0.02
    state = torch.zeros(2, 4, requires_grad=True)

    def timed(action) -> float:
        start = time.perf_counter()
        action()
        return (time.perf_counter() - start) / pace

    output = block(state)
    one = torch.ones_like(output)
    assert timed(lambda: block(state)) >= 1
    assert 1 <= timed(lambda: torch.autograd.grad(output, state, one, retain_graph=True)) < 2  # a relay
    assert timed(lambda: torch.autograd.grad(output, block.weight, one, retain_graph=True)) >= 2
    assert timed(lambda: torch.autograd.grad(output, [state, block.weight], one, retain_graph=True)) >= 2


def test_speed_ups_are_against_torchs_fastest_at_the_same_micro_batches():
    def row(system: str, seconds: float, microbatches: int) -> Row:
        return Row.of_times([seconds], system=system, windows="x", split=False, stages=2, microbatches=microbatches)

    rows = [row("mpc_dist", 1.0, 4), row("torch-GPipe", 3.0, 4), row("torch-1F1B", 2.0, 4), row("torch-1F1B", 9.0, 8)]
    (found,) = speed_ups(rows)
    assert (found["against"], found["speed_up"]) == ("torch-1F1B", 2.0)


def test_window_names_are_read():
    assert parse_windows("sliding:2", 4) == sliding(4, 2)
    assert parse_windows("tumbling:2", 4) == tumbling(4, 2)
    assert parse_windows("backprop", 4) == backprop(4)


@pytest.mark.slow
def test_the_tracking_benchmark_compares_tracked_with_untracked_steps(tmp_path: Path, monkeypatch):
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "places"))
    out = tmp_path / "rows.json"
    done = run(*"tracking --ranks 2 --microbatches 1 --f 0.02 --steps 3 --repeats 1 --json".split(), str(out))
    assert done.returncode == 0, done.stderr
    rows = {row["system"]: row for row in json.loads(out.read_text())}
    assert set(rows) == {"untracked", "W&B offline"}
    for row in rows.values():
        assert row["step_seconds"] > 0.9 * 3 * 0.02
    assert rows["W&B offline"]["ratio of medians"] > 0


@pytest.mark.slow
def test_the_link_benchmark_measures_every_horizon_on_every_link(tmp_path: Path):
    if reason := why_not():
        pytest.skip(reason)
    out, figure = tmp_path / "rows.json", tmp_path / "link.png"
    options = "link --stages 2 --microbatches 2 --f 0.002 --kibibytes 64 --delays 0.02 --megabits 20 --repeats 1"
    done = run(*options.split(), "--seconds", "0.05", "--json", str(out), "--out", str(figure))
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    seconds = {(row["windows"], row["split"], row["delay ms"], row["Mbit/s"]): row["step_seconds"] for row in rows}
    assert len(seconds) == 5 * 3
    for windows in ("backprop", "sliding:2"):
        # An activation there and its adjoint back; each 64 KiB take 26 ms at 20 Mbit/s.
        assert seconds[windows, True, 20.0, ""] > 2 * 0.02
        assert seconds[windows, True, 0.0, 20.0] > 2 * 0.026
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_the_link_benchmark_refuses_in_a_line_where_it_may_not_make_hosts():
    nobody = ["setpriv", "--reuid", "65534", "--clear-groups"] if os.geteuid() == 0 else []
    if nobody and shutil.which("setpriv") is None:
        pytest.skip("setpriv not found: root cannot become another user here")
    command = [*nobody, sys.executable, "launch/bench.py", "link"]
    environment = {**os.environ, "HOME": "/tmp", "MPLCONFIGDIR": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].endswith(
        "stages on hosts of their own cannot be had: network namespaces need root"
    )
