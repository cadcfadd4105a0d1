"""Ranks listen at the loopback interface only, unless the user names another."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from mpc_dist.runtime.interface import find_loopback
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import is_one_host
from tests.conftest import ROOT
from tests.robustness.listening import listening_addresses

HOLD = "import socket, sys\nwith socket.create_server((sys.argv[1], 0)): print('on', flush=True); sys.stdin.read()"


def addresses_while_joined(_rank: int) -> set[str]:
    dist.barrier()
    return listening_addresses(os.getpid())


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_an_open_port_is_seen(address: str):
    command = [sys.executable, "-c", HOLD, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"on\n"
        assert listening_addresses(process.pid) == {address}


def test_local_ranks_listen_at_the_loopback_only():
    for found in run_local_ranks(addresses_while_joined, 2):
        assert found == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, True),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, False),
        ({"WORLD_SIZE": "4"}, False),
        ({}, False),
    ],
)
def test_one_host_is_told_from_several(environment: dict[str, str], expected: bool):
    assert is_one_host(environment) == expected
    assert find_loopback() in ("lo", "lo0")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_of_torchrun_on_one_host_listen_at_the_loopback_only(tmp_path: Path):
    options = "--model.num_blocks 2 --model.width 8 --data.context 8 --data.max_bytes 4000 --batch_size 4 "
    options += "--parallel.stages 2 --training.steps 1000000 --training.log_every 1 --checkpoints.every 0"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["launch/train.py", *options.split(), "--training.folder", str(tmp_path / "run")]
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 300
        metrics = tmp_path / "run" / "metrics-rank1.jsonl"
        while not (metrics.exists() and '"event": "step"' in metrics.read_text()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        children = [int(one) for one in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        ranks = [listening_addresses(child) for child in children]
        assert [found for found in ranks if found] == [{"127.0.0.1"}] * 2
    finally:
        process.terminate()  # torchrun ends its ranks
        process.wait(120)
