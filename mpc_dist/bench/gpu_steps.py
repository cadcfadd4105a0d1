"""The checks of `make gpu-check`, in order."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mpc_dist.bench.compute import ComputeSetting, bench_compute
from mpc_dist.bench.gpu_check import Check, Finding, Largest
from mpc_dist.bench.gpu_ranks import (
    TIMEOUT,
    WINDOWS,
    Setting,
    compare_gradients,
    compare_precision,
    difference,
    do_everything,
    hold,
    train_some,
)
from mpc_dist.runtime.compiled import check_compiler
from mpc_dist.runtime.local import LocalRankError, run_local_ranks


def list_checks(setting: Setting) -> list[Check]:
    """All of them."""
    two = partial(_on_two_devices, setting)
    return [
        Check("tests", "the tests that need a GPU pass", partial(run_gpu_tests, setting)),
        Check("gradients", "every parameter's gradient is the definition's", two(look_at_gradients)),
        Check("hangs", "nothing hangs, whoever waits for its device", two(look_for_hangs)),
        Check(
            "precision",
            "in two bytes, gradients are the definition's, losses plain torch's",
            two(look_at_precision),
        ),
        Check("compile", "compiled blocks train as they are written", two(look_at_compiled)),
        Check("memory", "a rank holds what the planner predicts", two(look_at_memory)),
        Check("compute", "steps are no slower than torch's 1F1B", two(look_at_compute)),
    ]


def _on_two_devices(setting: Setting, look: Callable[[Setting], Finding]) -> Callable[[], Finding]:
    def run() -> Finding:
        count = torch.cuda.device_count()
        if setting.device == "cuda" and count < 2:
            return Finding("not run", f"needs 2 GPUs, this machine has {count}")
        return look(setting)

    return run


def run_gpu_tests(setting: Setting) -> Finding:
    """pytest, in those files that have any."""
    files = [path for path in sorted((setting.root / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *map(str, files)]
    done = subprocess.run(command, cwd=setting.root, capture_output=True, text=True, timeout=900)
    lines = done.stdout.strip().splitlines() or ["pytest said nothing"]
    if done.returncode == 0 and "passed" not in lines[-1]:
        return Finding("not run", f"no GPU is there: {lines[-1]}")
    return Finding("held" if done.returncode == 0 else "did not hold", lines[-1], lines[-30:])


def _on_ranks(setting: Setting, function: Callable[..., Any], *arguments: Any, timeout: float = 300.0) -> list[Any]:
    """What a function gave on each of two."""
    limit = TIMEOUT.total_seconds()
    return run_local_ranks(
        function, 2, setting, *arguments, timeout=timeout, group_timeout=limit, device_type=setting.device
    )


def look_at_gradients(setting: Setting) -> Finding:
    """In float64."""
    largest = Largest(1e-9)
    for rank, worst in enumerate(_on_ranks(setting, compare_gradients)):
        for case, value in worst.items():
            largest.add(f"{case}, rank {rank}", value)
    return largest.conclude("float64, 4 micro-batches")


def look_for_hangs(setting: Setting) -> Finding:
    """Each windows in processes of their own, within a time limit."""
    hung, figures = [], []
    for name in WINDOWS:
        try:
            counts = _on_ranks(setting, do_everything, name, timeout=60 if setting.is_quick else 180)
            figures.append(f"{name}: {counts[0]} steps with evaluations, angles and changes of windows")
        except LocalRankError as error:
            hung.append(name)
            figures.append(f"{name}: {str(error).splitlines()[-1]}")
    reason = f"stuck or failed: {', '.join(hung)}" if hung else f"{len(WINDOWS)} kinds of windows went through"
    return Finding("did not hold" if hung else "held", reason, figures)


def look_at_precision(setting: Setting) -> Finding:
    """The same casts, but sums in another order: some units of the last place, of which bfloat16 has few."""
    largest = Largest(0.02)
    kinds = (torch.bfloat16, torch.float16) if setting.device == "cuda" else (torch.bfloat16,)
    for dtype in kinds:
        for rank, worst in enumerate(_on_ranks(setting, compare_precision, dtype)):
            for case, value in worst.items():
                largest.add(f"{dtype}, {case}, rank {rank}", value)
    return largest.conclude(", ".join(map(str, kinds)))


def look_at_compiled(setting: Setting) -> Finding:
    """With relays and dropout."""
    try:
        check_compiler(setting.device)
    except ValueError as error:
        return Finding("not run", str(error))
    largest = Largest(1e-5 if setting.device == "cpu" else 1e-3)  # GPUs may take TF32 in other places
    both = [_on_ranks(setting, train_some, is_compiled, timeout=600) for is_compiled in (False, True)]
    for rank, (written, compiled) in enumerate(zip(*both, strict=True)):
        for name, value in written.items():
            largest.add(f"{name}, rank {rank}", difference(compiled[name], value))
    return largest.conclude("weights after 3 steps of sliding 2 with dropout")


def look_at_memory(setting: Setting) -> Finding:
    """The allocator's peak, on the CPU the bytes that are counted, against the prediction."""
    figures, ratios = [], []
    for name in ("h = 1", "back-propagation"):
        for rank, (predicted, held) in enumerate(_on_ranks(setting, hold, name)):
            ratios.append(held / predicted)
            figures.append(
                f"{name}, rank {rank}: predicted {predicted:,.0f} bytes, held {held:,.0f} ({ratios[-1]:.2f})"
            )
    is_near = min(ratios) >= 0.8 and max(ratios) <= 1.2
    reason = f"held / predicted is {min(ratios):.2f} to {max(ratios):.2f}, expected 0.8 to 1.2"
    return Finding("held" if is_near else "did not hold", reason, figures)


def look_at_compute(setting: Setting) -> Finding:
    """`bench.py compute` on these devices."""
    if setting.is_quick:
        shape = ComputeSetting(num_blocks=4, width=32, batch_size=32, microbatches=(2,), repeats=3)
    else:
        shape = ComputeSetting(width=2048, batch_size=4096, microbatches=(4, 16))
    rows = bench_compute(dataclasses.replace(shape, device_type=setting.device, with_deepspeed=False))
    figures = [
        f"{row.system} {row.windows}, M = {row.microbatches}: {1000 * row.step_seconds:.2f} ms, "
        f"1F1B / this {row.extra['1F1B / this']:.2f}"
        for row in rows
    ]
    ours = [row.extra["1F1B / this"] for row in rows if row.system == "mpc_dist"]
    reason = f"torch's 1F1B takes {min(ours):.2f} to {max(ours):.2f} times as long, expected at least 0.95"
    return Finding("held" if min(ours) >= 0.95 else "did not hold", reason, figures)
