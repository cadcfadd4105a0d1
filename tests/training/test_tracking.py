"""A run in W&B holds what its metrics files hold; and whatever the tracker does, training goes on."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from mpc_dist.runtime.lines import LineReceiver, open_store
from mpc_dist.runtime.mesh import Launch
from mpc_dist.training import journal as journal_module
from mpc_dist.training.config import ConfigParser
from mpc_dist.training.job import train
from mpc_dist.training.journal import Gatherer, Journal
from mpc_dist.training.metrics import MetricsFile, read_metrics
from mpc_dist.training.tracking import TrackingConfig, merge_rows, name_figures
from mpc_dist.training.wandb_tracker import choose_mode, has_key
from tests.conftest import ROOT
from tests.training.wandb_file import RunFile, read_run_file

SMALL = (
    "--config configs/gpt_train.yaml --model.num_blocks 4 --model.width 16 --data.context 16 --data.max_bytes 30000 "
    "--training.steps 6 --training.log_every 1 --training.eval_every 3 --training.eval_batches 2"
).split()
SECRET = "a-secret-in-the-environment"


@dataclass(frozen=True)
class Tracked:
    """A run that was tracked as a user tracks it."""

    folder: Path
    done: subprocess.CompletedProcess[str]
    home: Path
    mark: str
    """In the environment of every process of the run."""

    @property
    def run_files(self) -> list[Path]:
        return sorted((self.folder / "wandb").rglob("*.wandb"))

    def read(self) -> RunFile:
        (path,) = self.run_files
        return read_run_file(path)

    def processes(self) -> list[str]:
        """The command lines of processes of the run that still live."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (path / "environ").read_bytes():
                    found.append((path / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found


def run_tracked(folder: Path, num_ranks: int, *arguments: str, **environment: str) -> Tracked:
    home, mark = folder / "home", uuid.uuid4().hex
    home.mkdir(parents=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *(torchrun if num_ranks > 1 else []), "launch/train.py", *SMALL, *arguments]
    command += ["--training.folder", str(folder / "run"), "--tracking.wandb", "true"]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    places = {f"WANDB_{name}_DIR": str(folder / "places") for name in ("CONFIG", "CACHE", "DATA")}
    places["MPLCONFIGDIR"] = str(folder / "places")
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HOME": str(home), "NETRC": str(home / "none")}
    secrets = {"SLURM_JOB_COMMENT": SECRET, "SOME_TOKEN": SECRET, "MARK": mark}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=inherited | places | own | secrets | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return Tracked(folder / "run", done, home, mark)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    """Two ranks whose horizon grows, offline because there is no key."""
    options = "--horizon.mode adaptive --horizon.every 2 --tracking.tags [a,b] --tracking.group family".split()
    return run_tracked(tmp_path_factory.mktemp("two_ranks"), 2, *options)


@pytest.fixture(scope="module")
def unreachable(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    """A planned run with a key, but without a server that answers."""
    nowhere = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40, "WANDB_INIT_TIMEOUT": "2"}
    folder = tmp_path_factory.mktemp("unreachable")
    return run_tracked(folder, 1, "--parallel.stages", "1", "--horizon", "auto", **nowhere)


def twin_figures(folder: Path, num_ranks: int) -> dict[tuple[int, str], Any]:
    """Every figure of the metrics files, by step and by the name that it should have."""
    found: dict[tuple[int, str], Any] = {}
    plain = (
        "step_seconds busy_seconds samples_per_second bubble in_flight num_labels seconds_waiting_for_data "
        "seconds_waiting_for_head"
    ).split()
    plain += "skipped_steps live_bytes rank_bytes".split()
    for rank in range(num_ranks):
        for line in read_metrics(folder, rank):
            step = line.get("step")
            if line["event"] == "step":
                found |= {(step, f"loss/boundary_{s}"): loss for s, loss in line["losses"].items()}
                found |= {(step, f"rank_{rank}/{name}"): line[name] for name in plain if name in line}
                if rank == 0:
                    found[step, "samples_per_second"] = line["samples_per_second"]
            elif line["event"] == "evaluation":
                for s, score in line["scores"].items():
                    found[step, f"test_loss/boundary_{s}"] = score["loss"]
                    found[step, f"accuracy/boundary_{s}"] = score["accuracy"]
            elif line["event"] == "horizon" and rank == 0:
                found |= {(step, f"horizon/{name}"): line[name] for name in ("size", "before", "loss", "reason")}
                found[step, "angle/cosine"] = line["cosine"]
    return found


def logged_figures(run: RunFile) -> dict[tuple[int, str], Any]:
    found: dict[tuple[int, str], Any] = {}
    for row in run.rows:
        figures = {name: value for name, value in row.items() if name != "step" and not name.startswith("figures/")}
        for name, value in figures.items():
            assert (row["step"], name) not in found, "a figure is reported once"
            found[row["step"], name] = value
    return found


def test_one_run_file_holds_every_figure_of_the_metrics_files(two_ranks: Tracked):
    run = two_ranks.read()
    expected = twin_figures(two_ranks.folder, 2)
    some = {(1, "loss/boundary_2"), (6, "loss/boundary_4"), (1, "rank_1/live_bytes"), (3, "accuracy/boundary_4")}
    assert some <= set(expected)
    assert {step for step, name in expected if name == "angle/cosine"} == {2, 4, 6}
    assert logged_figures(run) == expected
    assert run.metrics == {"*": "step"}
    assert run.exit_code == 0


def test_the_run_has_the_configuration_the_topology_and_its_group(two_ranks: Tracked):
    run = two_ranks.read()
    config = yaml.safe_load((two_ranks.folder / "config.yaml").read_text())
    assert {key: run.config[key] for key in config} == config
    start = read_metrics(two_ranks.folder, 0)[0]
    topology = run.config["topology"]
    assert topology["num_stages"], topology["num_replicas"] == (2, 1)
    assert topology["partition"] == start["partition"] == [2, 2]
    assert topology["windows"] == start["windows"]
    assert (run.run["project"], run.run["group"], run.run["name"]) == ("mpc_dist", "family", "run")
    assert run.run["tags"] == ["a", "b"]


def test_the_summary_says_what_the_run_came_to(two_ranks: Tracked):
    summary = two_ranks.read().summary
    lines = [read_metrics(two_ranks.folder, rank) for rank in (0, 1)]
    ends = [found[-1] for found in lines]
    steps = [line for found in lines for line in found if line["event"] == "step" and "rank_bytes" in line]
    decisions = [line for line in lines[0] if line["event"] == "horizon"]
    expected = {
        "final_loss": ends[1]["scores"]["4"]["loss"],
        "final_accuracy": ends[1]["scores"]["4"]["accuracy"],
        "horizon_windows": "tumbling",
        "horizon_size": decisions[-1]["size"],
        "horizon_unit": "stages",
        "gpus": 2,
        "peak_bytes": max(line["rank_bytes"] for line in steps),
        "peak_live_bytes": max(line["live_bytes"] for line in steps),
        "seconds": max(end["seconds"] for end in ends),
        "steps": 6,
    }
    assert {key: summary[key] for key in expected} == expected


def test_the_schedule_is_among_the_figures(two_ranks: Tracked):
    (row,) = [row for row in two_ranks.read().rows if any(name.startswith("figures/") for name in row)]
    (run_file,) = two_ranks.run_files
    picture = run_file.parent / "files" / row["figures/schedule/path"]
    assert picture.read_bytes() == (two_ranks.folder / "schedule.png").read_bytes()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_a_key_the_run_is_offline_and_says_how_to_upload_it(two_ranks: Tracked):
    (run_file,) = two_ranks.run_files
    assert run_file.parent.name.startswith("offline-run-")
    assert two_ranks.done.stderr.count(f"tracking: offline; to upload the run: wandb sync {run_file.parent}\n") == 1
    assert two_ranks.done.stderr.count("tracking:") == 1


def test_tracking_leaves_no_process_and_nothing_in_the_home_folder(two_ranks: Tracked):
    deadline = time.monotonic() + 20
    while two_ranks.processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert two_ranks.processes() == []
    assert list(two_ranks.home.iterdir()) == []


def test_environment_variables_are_not_written_anywhere(two_ranks: Tracked):
    files = [path for path in two_ranks.folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        assert SECRET.encode() not in content, path
        assert two_ranks.mark.encode() not in content, path


def test_without_an_answer_from_the_server_the_run_is_kept_offline(unreachable: Tracked):
    (run_file,) = unreachable.run_files
    assert run_file.parent.name.startswith("offline-run-")
    assert "W&B does not answer (" in unreachable.done.stderr
    assert "to upload the run: wandb sync" in unreachable.done.stderr
    assert "test loss" in unreachable.done.stdout
    assert logged_figures(unreachable.read()) == twin_figures(unreachable.folder, 1)


def test_a_planned_run_has_its_plan_and_the_plans_picture(unreachable: Tracked):
    run = unreachable.read()
    plan = yaml.safe_load((unreachable.folder / "plan.yaml").read_text())
    assert run.config["plan"] == {key: value for key, value in plan.items() if key != "candidates"}
    names = {name.split("/")[1] for row in run.rows for name in row if name.startswith("figures/")}
    assert names == {"schedule", "plan"}
    (run_file,) = unreachable.run_files
    assert (run_file.parent / "files" / "plan.yaml").read_text() == (unreachable.folder / "plan.yaml").read_text()


BROKEN_WANDB = """
import os, time

WHERE = os.environ["BREAKS_IN"]
run = None


def breaks(where):
    if where == WHERE:
        raise RuntimeError(f"no {where}\\ntoday")


breaks("import")


class Settings:
    model_fields = {}


class Image:
    def __init__(self, path):
        breaks("show")


class Run:
    settings = type("Settings", (), {"sync_dir": "nowhere"})
    summary = {}

    def define_metric(self, *_, **__):
        pass

    def log(self, row):
        if "step" in row:
            breaks("log")
            if WHERE == "death":
                os._exit(3)

    def finish(self, exit_code):
        breaks("finish")
        time.sleep(60 if WHERE == "hang" else 0)


def init(**_):
    breaks("start")
    return Run()


def teardown():
    pass
"""


@pytest.fixture
def break_wandb(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a W&B in the place of the real one that raises, dies or hangs where it is told to."""

    def install(where: str) -> None:
        folder = tmp_path_factory.mktemp("broken")
        (folder / "wandb").mkdir()
        (folder / "wandb" / "__init__.py").write_text(BROKEN_WANDB)
        monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
        monkeypatch.setenv("BREAKS_IN", where)

    return install


@pytest.fixture
def small_config(tmp_path: Path) -> Any:
    arguments = [
        *SMALL,
        "--parallel.stages",
        "1",
        "--training.folder",
        str(tmp_path),
        "--tracking.wandb",
        "true",
        "--tracking.mode",
        "offline",
    ]
    arguments[1] = str(ROOT / arguments[1])
    config, _ = ConfigParser(arguments, prog="", description="").parse()
    return config


def train_with_picture(config: Any, folder: Path) -> None:
    scores = train(config, Launch(), is_quiet=True, draw=lambda *_: {"a": folder / "a.png"})
    assert scores[4].loss > 0
    events = [line["event"] for line in read_metrics(folder, 0) if line["event"] != "timeline"]
    assert events == ["start", *["step"] * 3, "evaluation", *["step"] * 3, "evaluation", "checkpoint", "saved", "end"]


@pytest.mark.parametrize("where", ["import", "start", "log", "show", "finish"])
def test_a_tracker_that_raises_is_said_once_and_loses_nothing(where, small_config, tmp_path, break_wandb, capfd):
    break_wandb(where)
    train_with_picture(small_config, tmp_path)
    said = capfd.readouterr().err
    assert said.count("tracking: stopped") == 1
    method = "start" if where == "import" else where
    assert f"tracking: stopped ({method}: RuntimeError: no {where} today); training goes on, and the metrics" in said


def test_a_tracker_that_dies_is_said_once_and_loses_nothing(small_config, tmp_path, break_wandb, capfd):
    break_wandb("death")
    train_with_picture(small_config, tmp_path)
    assert capfd.readouterr().err.count("stopped (its process ended with exit code 3); training goes on") == 1


def test_a_tracker_that_hangs_does_not_hold_up_the_end(small_config, tmp_path, break_wandb, monkeypatch, capfd):
    monkeypatch.setattr(journal_module, "PROCESS_PATIENCE", 3.0)
    break_wandb("hang")
    start = time.monotonic()
    train_with_picture(small_config, tmp_path)
    assert time.monotonic() - start < 50  # it hangs for 60 s
    assert "given up after 3 s; the metrics files have every figure" in capfd.readouterr().err


def test_a_picture_that_cannot_be_drawn_costs_only_the_picture(small_config, tmp_path, break_wandb, capfd):
    def draw(*_: object) -> dict[str, Path]:
        raise ValueError("no ink")

    break_wandb("nowhere")
    train(small_config, Launch(), is_quiet=True, draw=draw)
    said = capfd.readouterr().err
    assert "the figures of the run cannot be drawn (ValueError: no ink)" in said
    assert "stopped" not in said


START = {
    "config": {
        "horizon": {"mode": "fixed", "windows": "sliding", "size": 1, "unit": "stages"},
        "model": {"name": "gpt", "num_blocks": 2},
        "data": {"name": "text"},
    },
    "num_stages": 2,
    "num_replicas": 1,
    "device": "cpu",
    "partition": [1, 1],
    "windows": [],
}


def write_run(folder: Path, journal: Journal) -> None:
    metrics = MetricsFile(folder, 0, journal.put)
    metrics.write(event="start", **START)
    metrics.write(event="step", step=1, losses={1: 0.5}, bubble=0.25)
    metrics.write(event="timeline", step=1, actions=[])


def offline(folder: Path, **options: Any) -> Journal:
    return Journal(Gatherer(TrackingConfig(wandb=True, mode="offline"), folder, **options))


def test_training_that_fails_ends_the_run_as_failed(tmp_path, monkeypatch):
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "places"))

    def fail() -> None:
        with offline(tmp_path) as journal:
            write_run(tmp_path, journal)
            raise KeyError("a step")

    with pytest.raises(KeyError, match="a step"):
        fail()
    (path,) = (tmp_path / "wandb").rglob("*.wandb")
    run = read_run_file(path)
    assert logged_figures(run) == {(1, "loss/boundary_1"): 0.5, (1, "rank_0/bubble"): 0.25}
    assert run.exit_code == 1


def test_a_rank_that_is_gone_is_waited_for_a_while_only(tmp_path, break_wandb, monkeypatch, capfd):
    break_wandb("nowhere")
    monkeypatch.setattr(journal_module, "PATIENCE", 0.2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with offline(tmp_path, receiver=LineReceiver(open_store(store, "x"), [1, 2])) as journal:
        write_run(tmp_path, journal)
    said = capfd.readouterr().err
    assert "the last lines of ranks 1, 2 did not arrive" in said
    assert "stopped" not in said


def test_a_store_that_breaks_costs_the_other_ranks_figures_only(tmp_path, break_wandb, capfd):
    class Broken(LineReceiver):
        def receive(self) -> list[tuple[int, str]]:
            raise RuntimeError("connection reset")

    break_wandb("nowhere")
    with offline(tmp_path, receiver=Broken(dist.HashStore(), [1])) as journal:
        write_run(tmp_path, journal)
    said = capfd.readouterr().err
    assert said.count("no longer arrive (RuntimeError: connection reset)") == 1
    assert "stopped" not in said


def test_a_run_is_not_tracked_unless_asked_to(small_config, tmp_path, monkeypatch):
    def build(*_: object, **__: object) -> Gatherer:
        raise AssertionError("nobody asked for it")

    monkeypatch.setattr(journal_module, "Gatherer", build)
    train(replace(small_config, tracking=TrackingConfig()), Launch(), is_quiet=True)
    assert not (tmp_path / "wandb").exists()


def test_replicas_report_losses_of_their_own_and_evaluations_once():
    step = {"event": "step", "step": 3, "losses": {"4": 1.5}, "bubble": 0.1, "time": 9.0}
    assert name_figures(step, 2, 2) == {"step": 3, "loss/boundary_4": 1.5, "rank_2/bubble": 0.1}
    assert name_figures(step, 3, 2) == {"step": 3, "loss/boundary_4/replica_1": 1.5, "rank_3/bubble": 0.1}
    evaluation = {"event": "evaluation", "step": 3, "scores": {"4": {"loss": 2.0, "accuracy": None}}, "time": 9.0}
    assert name_figures(evaluation, 2, 2) == {"step": 3, "test_loss/boundary_4": 2.0}
    assert name_figures(evaluation, 3, 2) == {}


def test_rows_of_one_step_become_one():
    rows = [{"step": 1, "a": 1}, {"step": 2, "a": 2}, {"step": 1, "b": 3}]
    assert merge_rows(rows) == [{"step": 1, "a": 1, "b": 3}, {"step": 2, "a": 2}]


def test_the_mode_is_what_was_asked_for_else_the_environments_else_by_the_key(tmp_path):
    nothing = {"HOME": str(tmp_path)}
    assert choose_mode("auto", nothing) == "offline"
    assert choose_mode("auto", {**nothing, "WANDB_API_KEY": "k"}) == "online"
    assert choose_mode("auto", {**nothing, "WANDB_API_KEY": "k", "WANDB_MODE": "offline"}) == "offline"
    assert choose_mode("auto", {**nothing, "WANDB_MODE": "disabled"}) == "disabled"
    assert choose_mode("online", {**nothing, "WANDB_MODE": "offline"}) == "online"
    assert choose_mode("offline", {**nothing, "WANDB_API_KEY": "k"}) == "offline"


def test_a_key_is_found_in_a_netrc_file_of_its_server(tmp_path):
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    assert has_key({"HOME": str(tmp_path)})
    assert not has_key({"HOME": str(tmp_path), "WANDB_BASE_URL": "https://wandb.example.org"})
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user")  # cut off
    assert not has_key({"HOME": str(tmp_path)})
    assert not has_key({"HOME": str(tmp_path / "elsewhere")})
    (tmp_path / "_netrc").write_text("machine api.wandb.ai login user password key\n")  # looked at after the other
    assert has_key({"HOME": str(tmp_path)})
    (tmp_path / ".netrc").unlink()
    assert has_key({"HOME": str(tmp_path)})


def test_what_is_wrong_with_tracking_is_said_before_training(small_config, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"tracking\.project 'a/b' is no name of a W&B project; leave out slashes"):
        TrackingConfig(project="a/b")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"tracking\.wandb needs wandb; pip install 'mpc_dist\[wandb\]'"):
        train(small_config, Launch(), is_quiet=True)
    assert not list(tmp_path.iterdir())
