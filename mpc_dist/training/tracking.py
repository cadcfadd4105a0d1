"""What a run reports to a tracker: its settings at the start, named figures by step, and a summary at the end.

Every figure comes from a line of the metrics files, which stay the plain twin: what a tracker loses is in them.
"""

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml
from rich.console import Console

Draw = Callable[[], Mapping[str, Path]]
"""Draws the figures of a run: the file of each, by name."""


@dataclass(frozen=True)
class TrackingConfig:
    """Where a run is reported besides its metrics files."""

    wandb: bool = False
    """Whether to report to Weights & Biases: one run per job, whatever the number of ranks."""
    project: str = "mpc_dist"
    """The W&B project."""
    group: str | None = None
    """The experiment that the run belongs to; null: the model's and the data's name."""
    name: str | None = None
    """The run's name; null: that of its folder."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """auto: as WANDB_MODE says, else online if an API key is configured, else offline; `wandb sync` uploads later."""
    tags: tuple[str, ...] = ()
    """Tags of the run, e.g. [baseline,gpt]."""

    def __post_init__(self) -> None:
        if not self.project or "/" in self.project:
            raise ValueError(f"tracking.project {self.project!r} is no name of a W&B project; leave out slashes")

    def check_installed(self) -> None:
        """Raise if what is asked for is not installed."""
        if self.wandb and importlib.util.find_spec("wandb") is None:
            raise ValueError("tracking.wandb needs wandb; pip install 'mpc_dist[wandb]', or leave it out")


@dataclass(frozen=True)
class RunInfo:
    """What is known of a run when it starts."""

    config: Mapping[str, Any]
    """The full configuration."""
    topology: Mapping[str, Any]
    """Stages, replicas, partition, windows, device."""
    plan: Mapping[str, Any] | None
    """The plan that is run, without the candidates that it beat; None if the run is not planned."""
    folder: Path
    """Where the metrics and the plan are."""


class Tracker(Protocol):
    """Anything that figures are reported to. It may raise: that ends the tracking, never the training."""

    def start(self, info: RunInfo) -> None:
        """Begin the run."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Report figures; `step` among them says which step they are of, and steps may come in any order."""

    def show(self, name: str, figure: Path) -> None:
        """Report a picture."""

    def finish(self, summary: Mapping[str, Any], *, succeeded: bool) -> None:
        """End the run."""


def describe_run(start: Mapping[str, Any], folder: Path) -> RunInfo:
    """From rank 0's first line, and the plan in the run folder if there is one."""
    config = start["config"]
    topology = {key: start[key] for key in ("num_stages", "num_replicas", "device", "partition", "windows")}
    plan = None
    path = folder / "plan.yaml"
    if path.exists():
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        plan = {key: value for key, value in content.items() if key != "candidates"}
    return RunInfo(config, {**topology, "horizon": config["horizon"]}, plan, folder)


def name_figures(line: Mapping[str, Any], rank: int, num_replicas: int) -> dict[str, Any]:
    """The figures of a line by their names in a tracker; none for lines that carry no figures.

    What all ranks know alike (evaluations of replicas, decisions on the horizon) is taken from the first that knows it.
    """
    event, replica = line["event"], rank % num_replicas
    figures: dict[str, Any] = {}
    if event == "step":
        of_replica = f"/replica_{replica}" if replica else ""
        figures |= {f"loss/boundary_{s}{of_replica}": loss for s, loss in line["losses"].items()}
        own = _numbers(line, without=("step", "time"))
        figures |= {f"rank_{rank}/{name}": value for name, value in own.items()}
        if rank == 0 and "samples_per_second" in own:
            figures["samples_per_second"] = own["samples_per_second"]
    elif event == "evaluation" and replica == 0:
        for boundary, score in line["scores"].items():
            figures[f"test_loss/boundary_{boundary}"] = score["loss"]
            if score["accuracy"] is not None:
                figures[f"accuracy/boundary_{boundary}"] = score["accuracy"]
    elif event == "horizon" and rank == 0:
        figures |= {f"horizon/{name}": line[name] for name in ("size", "before", "loss", "reason")}
        figures["angle/cosine"] = line["cosine"]
    return {"step": line["step"], **figures} if figures else {}


def _numbers(line: Mapping[str, Any], *, without: Iterable[str]) -> dict[str, Any]:
    return {
        name: value
        for name, value in line.items()
        if isinstance(value, Real) and not isinstance(value, bool) and name not in without
    }


def merge_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per step, in the order in which steps first occur: ranks report the same step one after the other."""
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        merged.setdefault(row["step"], {}).update(row)
    return list(merged.values())


@dataclass
class Summary:
    """Gathers what a run comes to, from its lines as they arrive."""

    info: RunInfo
    _figures: dict[str, Any] = field(default_factory=dict)

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line of any rank into account."""
        found, event = self._figures, line["event"]
        if event == "step":
            for name, key in (("rank_bytes", "peak_bytes"), ("live_bytes", "peak_live_bytes")):
                if name in line:
                    found[key] = max(found.get(key, 0), line[name])
        elif event == "horizon":
            found |= {"horizon_windows": "tumbling", "horizon_size": line["size"]}
        elif event == "end":
            found["steps"] = line["step"]
            found["seconds"] = max(found.get("seconds", 0.0), line["seconds"])
            score = line["scores"].get(str(sum(self.info.topology["partition"])))
            if score is not None:
                found["final_loss"] = score["loss"]
                if score["accuracy"] is not None:
                    found["final_accuracy"] = score["accuracy"]

    def values(self) -> dict[str, Any]:
        """The summary so far."""
        horizon, topology = self.info.config["horizon"], self.info.topology
        is_adaptive = horizon["mode"] == "adaptive"
        return {
            "gpus": topology["num_stages"] * topology["num_replicas"],
            "horizon_windows": "tumbling" if is_adaptive else horizon["windows"],
            "horizon_size": 1 if is_adaptive else horizon["size"],
            "horizon_unit": "stages" if is_adaptive else horizon["unit"],
            **self._figures,
        }


def say(text: str) -> None:
    """One line on the error stream, about what does not stop a run."""
    Console(stderr=True).print(f"tracking: {text}", highlight=False, markup=False, soft_wrap=True)
