"""Where a run goes on from: the newest undamaged checkpoint of its own folder, of another run, or none."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from mpc_dist.runtime.mesh import Mesh
from mpc_dist.training.checkpoint import SavedCheckpoint, find_run_checkpoints, newest_undamaged
from mpc_dist.training.checkpoint_folder import clear, folder_of, read_state
from mpc_dist.training.config import Config

AUTO, NEVER = "auto", "never"
_PLACES = ("path", "checkpoint")  # where a model's first weights came from: they may have moved since


def weights_fingerprint(config: Config) -> dict[str, Any]:
    """What must agree for saved weights and optimizer state to fit."""
    values = config.as_dict()
    model = {name: value for name, value in values["model"].items() if name not in _PLACES}
    kept = {"lora": values["lora"], "readout": config.readout.identify()}
    kept |= {"model": model, "optimizer": values["optimizer"]["name"]}
    plain: dict[str, Any] = json.loads(json.dumps(kept))
    return plain


class Resume:
    """The choice of a checkpoint; what is wrong with the configuration is found at once, before ranks meet."""

    def __init__(self, config: Config, rank: int) -> None:
        self._wish = config.checkpoints.resume
        self._rank = rank
        self._run = Path(config.training.folder)
        self._is_off = config.checkpoints.every == 0 and self._wish == AUTO
        self._candidates: list[Path] = []
        if self._is_off:
            return
        if self._wish != NEVER:
            self._candidates = self._find_candidates()
        if self._wish not in (AUTO, NEVER) and not self._candidates:
            raise ValueError(
                f"checkpoints.resume: {self._wish} holds no checkpoint; give a run folder, a checkpoint, auto or never"
            )
        for path in reversed(self._candidates):
            try:
                saved = read_state(path).fingerprint
            except ValueError:
                continue  # damaged: found and said when it is chosen
            self._check_fits(path, saved, weights_fingerprint(config))
            break

    def _find_candidates(self) -> list[Path]:
        own = find_run_checkpoints(self._run)
        if self._wish == AUTO:
            return own
        wished = find_run_checkpoints(Path(self._wish))
        # A run that began from another one and was started again goes on from its own; one of its own is a step back.
        return own if own and wished and not self._is_own(wished[0]) else wished

    def _check_fits(self, path: Path, saved: dict[str, Any], own: dict[str, Any]) -> None:
        for name, value in saved.items():
            if own.get(name) != value:
                raise ValueError(
                    f"checkpoint {path} is of another {name}: it has {value}, the configuration {own.get(name)}; use "
                    "the configuration it was saved with, another training.folder, or checkpoints.resume: never"
                )

    def choose(self, mesh: Mesh) -> SavedCheckpoint | None:
        """The checkpoint to go on from. All ranks call it and get the same."""
        if self._is_off:
            return None
        saved, damages = newest_undamaged(self._candidates, rank=self._rank, group=mesh.background)
        if self._rank == 0:
            console = Console(stderr=True)
            for damage in damages:
                console.print(damage, highlight=False, markup=False, soft_wrap=True)
            if saved is not None:
                instead = "" if self._wish == AUTO or not self.is_own(saved) else f" (not from {self._wish})"
                instead = "" if Path(self._wish).resolve() == saved.path.resolve() else instead
                console.print(f"going on from {saved.path}{instead}", highlight=False, markup=False, soft_wrap=True)
            clear(folder_of(self._run), after=self._last_kept(saved))
        if saved is None and damages:
            raise ValueError(
                f"no checkpoint of {self._run if self._wish == AUTO else self._wish} is undamaged; set "
                "checkpoints.resume: never to start anew"
            )
        return saved

    def _last_kept(self, saved: SavedCheckpoint | None) -> int | None:
        """Checkpoints of this run after that step are damaged, or of a way that is not gone on; None: none is."""
        if self._wish == NEVER:
            return 0
        return saved.state.step if saved is not None and self.is_own(saved) else None

    def is_own(self, saved: SavedCheckpoint) -> bool:
        """Whether a checkpoint is of this very run, whose metrics then go on."""
        return self._is_own(saved.path)

    def _is_own(self, checkpoint: Path) -> bool:
        return checkpoint.parent.resolve() == folder_of(self._run).resolve()
