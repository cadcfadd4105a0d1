"""Two hosts of two ranks train through torchrun's rendezvous as four local ranks do; a cut link costs a restart."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mpc_dist.bench.hosts import Network, why_not
from mpc_dist.training.checkpoint_folder import folder_of, list_checkpoints
from mpc_dist.training.metrics import read_metrics
from tests.conftest import ROOT
from tests.reliability.agent import run_job
from tests.reliability.points import COMMON, JOBS, build, read_losses, read_weights
from tests.reliability.test_torchrun import ranks_of, wait_for_checkpoints

JOB = "2 stages x 2 replicas, shared head"
NUM_RANKS = 4
STEPS_OF_CUT = 100
TIMEOUT = 8.0
"""parallel.timeout of the job whose link is cut."""


@pytest.fixture(scope="module", autouse=True)
def _hosts_can_be_made() -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)


@contextmanager
def torchruns(network: Network, folder: Path, *arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    """One torchrun on each host, as a user would start them; their output is beside the run's folder."""
    given = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    given |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29400", "--rdzv-id", "two-hosts"]
    command += ["--max-restarts", "3", "launch/train.py", *COMMON, *JOBS[JOB].split()]
    command += ["--training.folder", str(folder), *arguments]
    launchers = []
    try:
        for host in network.hosts:
            with output_of(folder, host.number).open("w") as output:
                options = {"cwd": ROOT, "env": given, "stdout": output, "stderr": subprocess.STDOUT}
                launchers.append(network.start(host, command, **options))
        yield launchers
    finally:
        for process in launchers:
            process.kill()  # its ranks go with it
            process.wait(20)


def output_of(folder: Path, host: int) -> Path:
    return folder.with_name(f"{folder.name}-host{host}.txt")


def wait_for_all(launchers: list[subprocess.Popen[str]], folder: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in launchers]
    assert codes == [0, 0], "\n".join(output_of(folder, host).read_text() for host in range(2))


def train_locally(folder: Path, *arguments: str) -> tuple[dict[tuple[int, str], float], Mapping[str, torch.Tensor]]:
    """Losses and weights of the same job on four local ranks."""
    outcome = run_job(build(JOB, folder / "run", *arguments), folder)
    assert outcome.succeeded, outcome.attempts[-1].errors
    return dict(read_losses(folder / "run", NUM_RANKS)), read_weights(folder / "run")


def check_equal(folder: Path, losses: Mapping[tuple[int, str], float], weights: Mapping[str, torch.Tensor]) -> None:
    written = read_losses(folder, NUM_RANKS)
    assert dict(written).keys() == losses.keys()
    for key, loss in written:
        assert loss == losses[key], key
    found = read_weights(folder)
    assert found.keys() == weights.keys()
    for name, tensor in found.items():
        # Training draws nothing from the process's own generator, whose state is that of how it was launched.
        assert name.startswith("random.") or torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("own_name", ["loopback", pytest.param("card", marks=pytest.mark.slow)])
def test_two_hosts_of_two_ranks_train_as_four_local_ranks_do(own_name, tmp_path: Path):
    """Whatever address a host's own name has: gloo must not listen where the other host cannot reach it."""
    with Network(2, own_name=own_name) as network, torchruns(network, tmp_path / "run") as launchers:
        wait_for_all(launchers, tmp_path / "run", 150)
    check_equal(tmp_path / "run", *train_locally(tmp_path / "local"))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("which", [0, 1], ids=["of the store's host", "of the other host"])
def test_a_cut_link_is_noticed_on_both_sides_and_survived_by_a_restart(which, tmp_path: Path, capsys):
    run = tmp_path / "run"
    options = ("--training.steps", str(STEPS_OF_CUT), "--parallel.timeout", str(TIMEOUT))
    with Network(2) as network, torchruns(network, run, *options) as launchers:
        wait_for_checkpoints(run, 2)
        ranks = [pid for process in launchers for pid in ranks_of(process.pid)]
        assert len(ranks) == NUM_RANKS
        network.cut(network.hosts[which])
        begin, noticed, ended = time.monotonic(), None, None
        # The link stays cut until every rank of both hosts has given up by itself.
        while ended is None and time.monotonic() < begin + TIMEOUT + 60:
            now = time.monotonic() - begin
            noticed = now if noticed is None and any((run / "stall").glob("*/*")) else noticed
            ended = None if any(map(is_running, ranks)) else now
            time.sleep(0.02)
        before = list_checkpoints(folder_of(run))[-1]
        network.mend(network.hosts[which])
        said = "\n".join(output_of(run, host).read_text() for host in range(2))
        with capsys.disabled():
            sys.stdout.write(f"\ncut link: noticed after {noticed} s, all ranks ended after {ended} s\n")
        assert noticed is not None
        assert noticed < TIMEOUT + 5, said
        assert ended is not None, said
        assert ended < TIMEOUT + 5 + 5, said  # a busy machine
        wait_for_all(launchers, run, 300)
    starts = [sum(line["event"] == "start" for line in read_metrics(run, rank)) for rank in range(NUM_RANKS)]
    assert min(starts) >= 2
    resumed = [line["step"] for line in read_metrics(run, 0) if line["event"] == "resume"]
    assert f"{resumed[0]:08d}" in before.name
    check_equal(run, *train_locally(tmp_path / "local", *options))
