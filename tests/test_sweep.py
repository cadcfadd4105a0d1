"""`mpc-dist sweep` as a user runs it, and the W&B sweep that does the same."""

import itertools
import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mpc_dist.cli import EXIT_BAD_INPUT, EXIT_FAILED, main
from mpc_dist.commands.sweep import list_members, parse_horizon
from mpc_dist.report.outcome import Curve, Outcome, read_outcome
from mpc_dist.report.sweep import Family, SweepReport
from mpc_dist.training.config import ConfigParser
from mpc_dist.training.metrics import read_metrics
from mpc_dist.training.sections import HorizonConfig
from tests.conftest import ROOT

SMALL = (
    "--model.num_blocks 2 --model.width 8 --model.num_heads 2 --data.context 8 --data.max_bytes 20000 --batch_size 4 "
    "--training.steps 4 --training.log_every 1 --training.eval_every 2 --training.eval_batches 1"
).split()
CONFIG = ["--config", str(ROOT / "configs" / "gpt_train.yaml"), *SMALL]
WANDB_SWEEP = ROOT / "configs" / "wandb" / "horizon_sweep.yaml"


def sweep(out: Path, *arguments: str) -> int:
    return main(["sweep", *CONFIG, "--out", str(out), *arguments])


def times(out: Path) -> dict[str, float]:
    """When each run of a sweep ended."""
    return {path.name: read_metrics(path, 0)[-1]["time"] for path in out.iterdir() if path.is_dir()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two horizons on two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        out = tmp_path_factory.mktemp("sweep") / "family"
        assert sweep(out, "--horizons", "1,backprop") == 0
    return out


def test_a_sweep_trains_every_horizon_as_one_group_and_compares_them(finished: Path):
    content = json.loads((finished / "sweep.json").read_text())
    assert {family["horizon"]: family["windows"] for family in content} == {
        "1": ["sliding 1 stages"],
        "backprop": ["backprop"],
    }
    losses = [family["test_loss"] for family in content]
    assert losses == sorted(losses)
    for family, name in ((family, "h1" if family["horizon"] == "1" else "backprop") for family in content):
        folder = finished / f"{name}-seed0"
        end = read_metrics(folder, 1)[-1]
        assert family["seeds"]["0"]["test_loss"] == family["test_loss"] == end["scores"]["2"]["loss"]
        assert family["seeds"]["0"]["curve"]["steps"] == [2, 4]
        peaks = [read_metrics(folder, rank)[1]["rank_bytes"] for rank in (0, 1)]
        assert family["seeds"]["0"]["peak_bytes"] == peaks
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert (config["tracking"]["group"], config["tracking"]["name"]) == ("family", folder.name)
    assert (finished / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_command_runs_nothing_again_and_prints_the_table(finished: Path, capsys):
    before = times(finished)
    assert sweep(finished, "--horizons", "1,backprop") == 0
    printed = capsys.readouterr().out
    assert printed.count("complete, not run again") == 2
    for heading in ("horizon", "test loss", "accuracy", "step ms", "peak MiB per rank", "GPUs", "time s"):
        assert heading in printed
    assert times(finished) == before


@pytest.mark.slow
def test_what_was_interrupted_is_gone_on_with_and_a_failure_stops_no_other(finished, monkeypatch, capsys):
    """The last line of one run is lost; a third horizon cannot run; the first is complete."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    before = times(finished)
    metrics = finished / "backprop-seed0" / "metrics-rank1.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    (finished / "tumbling1-seed0" / "metrics-rank1.jsonl").mkdir(parents=True)  # cannot be written to
    assert sweep(finished, "--horizons", "1,tumbling:1,backprop") == EXIT_FAILED
    captured = capsys.readouterr()
    log = finished / "tumbling1-seed0" / "log.txt"
    assert f"1 of 3 runs failed; see {log}; the same command runs them again" in captured.err
    assert "IsADirectoryError" in log.read_text()
    (finished / "tumbling1-seed0" / "metrics-rank1.jsonl").rmdir()
    after = times(finished)
    assert after["h1-seed0"] == before["h1-seed0"]
    assert after["backprop-seed0"] > before["backprop-seed0"]
    assert [line["event"] for line in read_metrics(finished / "backprop-seed0", 1)].count("resume") == 1
    assert [family["horizon"] for family in json.loads((finished / "sweep.json").read_text())].count("backprop") == 1


def test_a_run_with_another_configuration_is_moved_aside_not_taken_for_this_one(finished: Path):
    arguments = [*CONFIG, "--training.steps", "3"]
    config, _ = ConfigParser(arguments, prog="", description="").parse()
    (member,) = list_members(config, ["1"], 1, finished)
    assert member.is_of_another_configuration()
    assert member.read() is None
    from mpc_dist.commands.sweep import _move_aside

    _move_aside(member.folder)
    assert read_outcome(finished / "h1-seed0.old1") is not None
    assert not member.folder.exists()


def test_horizons_are_read_as_words():
    stages, blocks = HorizonConfig(), HorizonConfig(unit="blocks")
    assert parse_horizon("1", stages) == HorizonConfig("sliding", 1, "stages")
    assert parse_horizon("2", stages) == HorizonConfig("tumbling", 2, "stages")
    assert parse_horizon("sliding:3", blocks) == HorizonConfig("sliding", 3, "blocks")
    assert parse_horizon("tumbling:2", stages) == HorizonConfig("tumbling", 2, "stages")
    assert parse_horizon("cumulative:2", blocks) == HorizonConfig("cumulative", 2, "blocks")
    assert parse_horizon("backprop", stages) == HorizonConfig("backprop")
    assert parse_horizon("auto", stages) == HorizonConfig(mode="auto")


def test_seeds_count_from_the_configurations(tmp_path):
    config, _ = ConfigParser([*CONFIG, "--seed", "5"], prog="", description="").parse()
    members = list_members(config, ["1", "auto"], 2, tmp_path)
    assert [member.folder.name for member in members] == ["h1-seed5", "h1-seed6", "auto-seed5", "auto-seed6"]
    assert [member.config.seed for member in members] == [5, 6, 5, 6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--horizons 1,far", "unknown horizon 'far'; use a whole number (tumbling windows of so many stages), auto,"),
        ("--horizons tumbling", "unknown horizon 'tumbling'; use"),
        ("--horizons 1,9", "horizon.size 9 exceeds the 2 stages of this run; use 1..2"),
        ("--horizons 0", "horizon.size 0 is out of range; use 1 or more"),
        ("--horizons 1,1", "--horizons 1,1 names one twice; list each once"),
        ("--seeds 0", "--seeds 0 is out of range; use 1 or more"),
    ],
)
def test_a_sweep_that_cannot_run_is_said_before_its_first_run(arguments, message, tmp_path, capsys):
    assert sweep(tmp_path / "out", *arguments.split()) == EXIT_BAD_INPUT
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def outcome(loss: float, *, gpus: int = 2) -> Outcome:
    curve = Curve((1, 2), (0.5, 1.0), (2 * loss, loss))
    return Outcome(loss, 0.5, 0.01, (2**20,) * gpus, 3.0, curve)


def test_horizons_are_ranked_by_the_mean_over_seeds_and_a_diverged_one_is_last(tmp_path):
    families = [
        Family("1", ("sliding 1 stages",), {0: outcome(2.0), 1: outcome(4.0)}),
        Family("2", ("sliding 2 stages",), {0: outcome(float("nan"))}),
        Family("auto", ("tumbling 2 stages", "backprop"), {0: outcome(1.0), 1: outcome(2.0)}),
    ]
    report = SweepReport(families)
    assert [family.title for family in report.ranked] == ["auto (tumbling 2 stages, backprop)", "h = 1", "h = 2"]
    assert families[0].over_seeds("test_loss") == pytest.approx((3.0, 2**0.5))
    report.write(tmp_path / "sweep.json")
    assert json.loads((tmp_path / "sweep.json").read_text())[1]["test_loss_deviation"] == pytest.approx(2**0.5)
    report.figure().savefig(tmp_path / "sweep.png")


def grid() -> list[dict[str, Any]]:
    """Every point of the W&B sweep."""
    parameters = yaml.safe_load(WANDB_SWEEP.read_text())["parameters"]
    values = [parameter["values"] for parameter in parameters.values()]
    return [dict(zip(parameters, point, strict=True)) for point in itertools.product(*values)]


def agent_command(point: dict[str, Any]) -> list[str]:
    """The command line of W&B's own agent for a point of the grid."""
    from wandb.sdk.launch.sweeps import utils

    content = yaml.safe_load(WANDB_SWEEP.read_text())
    given = {"args": {name: {"value": value} for name, value in point.items()}}
    macros = {**utils.create_sweep_command_args(given), "program": [content["program"]], "env": ["/usr/bin/env"]}
    words: list[str] = []
    for word in utils.create_sweep_command(content["command"]):
        words += macros[word[2:-1]] if word.startswith("${") and word.endswith("}") else [word]
    return words


def test_the_wandb_sweep_is_what_wandb_takes():
    from wandb.apis.public.sweeps import _validate_config_and_fill_distribution

    content = yaml.safe_load(WANDB_SWEEP.read_text())
    assert _validate_config_and_fill_distribution(content) == content
    assert set(content) <= {"name", "project", "program", "method", "metric", "parameters", "command", "description"}
    assert content["method"] == "grid"
    assert content["metric"] == {"name": "final_loss", "goal": "minimize"}  # a key of the runs' summary
    assert (ROOT / content["program"]).exists()


def windows_of(horizon: HorizonConfig) -> tuple[str, str, int | None] | str:
    """What a configuration asks for; `auto` overrides whatever else is in it."""
    return horizon.mode if horizon.mode == "auto" else (horizon.windows, horizon.unit, horizon.size)


def test_every_point_of_the_wandb_sweep_is_the_same_run_as_the_commands(tmp_path, monkeypatch):
    """A stand-in for torchrun shows what the agent's command line becomes; the words are read as `train.py` does."""
    (tmp_path / "torchrun").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    monkeypatch.chdir(ROOT)
    horizons: list[HorizonConfig] = []
    for number, point in enumerate(grid()):
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "WANDB_RUN_ID": f"id{number}"}
        done = subprocess.run(
            agent_command(point), env=environment, capture_output=True, text=True, timeout=30, check=True
        )
        words = done.stdout.split("\0")[:-1]
        assert words[:4] == ["--standalone", "--nproc-per-node", "4", "launch/train.py"]
        config, _ = ConfigParser(words[4:], prog="train.py", description="").parse()
        assert config.num_ranks == 4
        assert config.training.folder == f"runs/horizon_sweep/id{number}"
        assert (config.tracking.wandb, config.tracking.group) == (True, "horizon_sweep")
        assert config.seed == point["seed"]
        horizons.append(config.horizon)
    family = list_members(config, ["1", "2", "4", "auto"], 3, tmp_path)
    assert [windows_of(horizon) for horizon in horizons] == [windows_of(member.config.horizon) for member in family]


def test_the_commands_in_the_wandb_sweeps_header_name_the_file():
    commands = [line[1:].strip() for line in WANDB_SWEEP.read_text().splitlines() if line.startswith("#   wandb ")]
    assert shlex.split(commands[0])[-1] == str(WANDB_SWEEP.relative_to(ROOT))
