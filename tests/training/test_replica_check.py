"""Replicas that part are noticed, and no checkpoint is made of one of them."""

from pathlib import Path

import pytest

from mpc_dist.training.checkpoint_folder import folder_of, list_checkpoints, step_of
from mpc_dist.training.metrics import read_metrics
from tests.training.faulty import SMALL, Fault, train_faulty
from tests.training.local import parse

REPLICAS = "--parallel.stages 2 --data_parallel.degree 2 --horizon 1 --training.steps 6".split()
PARTING = Fault(4, "drift", step=2, replica=1)  # a bias of the second stage, in step 3 (from 1)


def test_replicas_that_part_stop_the_run_at_the_next_check(tmp_path: Path):
    options = "--data_parallel.check_every 2 --checkpoints.every 2".split()
    config = parse([*SMALL, *REPLICAS, *options, "--training.folder", str(tmp_path)])
    answers = train_faulty(config, PARTING, may_fail=True)
    for found in answers:
        assert "step 4: stage 1: blocks.4." in found
        assert "of replica 1 differ from replica 0's" in found
    assert [step_of(path) for path in list_checkpoints(folder_of(tmp_path))] == [2]
    agreed = {rank: [x["step"] for x in read_metrics(tmp_path, rank) if x["event"] == "replicas"] for rank in range(4)}
    assert agreed[2] == agreed[3] == [2]  # the stage whose replicas have parted
    assert agreed[0][:2] == agreed[1][:2] == [2, 4]  # and may have run ahead


def test_replicas_are_compared_before_a_checkpoint_even_if_no_check_is_due(tmp_path: Path):
    options = "--data_parallel.check_every 100 --checkpoints.every 4".split()
    config = parse([*SMALL, *REPLICAS, *options, "--training.folder", str(tmp_path)])
    assert all("step 4: stage 1: blocks.4." in found for found in train_faulty(config, PARTING, may_fail=True))
    assert list_checkpoints(folder_of(tmp_path)) == []


def test_replicas_that_agree_are_reported_so_once_for_each_check(tmp_path: Path):
    options = "--data_parallel.check_every 2 --checkpoints.every 3".split()
    config = parse([*SMALL, *REPLICAS, *options, "--training.folder", str(tmp_path)])
    train_faulty(config, None)
    for rank in range(4):
        checks = [line for line in read_metrics(tmp_path, rank) if line["event"] == "replicas"]
        assert [(line["step"], line["agree"]) for line in checks] == [(2, True), (3, True), (4, True), (6, True)]
        assert all(0 < line["seconds"] < 60 for line in checks)


def test_checks_can_be_turned_off(tmp_path: Path):
    config = parse([*SMALL, *REPLICAS, "--data_parallel.check_every", "0", "--training.folder", str(tmp_path)])
    train_faulty(config, PARTING)
    assert not [line for line in read_metrics(tmp_path, 0) if line["event"] == "replicas"]
    with pytest.raises(ValueError, match=r"data_parallel\.check_every"):
        parse([*SMALL, "--data_parallel.check_every", "-1"])
