"""Reports a run to Weights & Biases: online, or offline for a later `wandb sync`. It sends no environment variables."""

import netrc
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from mpc_dist.training.tracking import RunInfo, TrackingConfig, say

Mode = Literal["online", "offline", "disabled"]

INIT_SECONDS = 30.0
"""How long W&B may take to answer before the run is kept offline."""
FINISH_SECONDS = 60.0
"""How long the last upload may take; what is left then is uploaded by `wandb sync`."""
DEFAULT_SERVER = "https://api.wandb.ai"


class WandbTracker:
    """One W&B run. Steps may come in any order: `step` is an axis of its own."""

    def __init__(
        self, config: TrackingConfig, *, is_resumed: bool = False, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._config = config
        self._is_resumed = is_resumed
        self._environment = environment
        self._run: Any = None

    def start(self, info: RunInfo) -> None:
        """Begin a run, or go on with that of the job that is resumed; offline if W&B does not answer."""
        mode = choose_mode(self._config.mode, self._environment)
        if mode == "disabled":
            return
        id_file = info.folder / "wandb" / "run_id"
        run_id = self._choose_id(id_file)
        id_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._run = self._begin(info, run_id, mode)
        except Exception as error:
            if mode == "offline":
                raise
            reason = str(error).partition("\n")[0]
            say(f"W&B does not answer ({reason}); the run is kept offline")
            _stop_process()  # the attempt holds the run's id
            for folder in id_file.parent.glob(f"run-*-{run_id}"):
                shutil.rmtree(folder)
            mode = "offline"
            self._run = self._begin(info, run_id, mode)
        id_file.write_text(run_id, encoding="utf-8")
        self._run.define_metric("*", step_metric="step")
        if info.plan is not None:
            self._run.save(str(info.folder / "plan.yaml"), base_path=str(info.folder), policy="now")
        if mode == "offline":
            say(f"offline; to upload the run: wandb sync {self._run.settings.sync_dir}")
        else:
            say(f"online at {self._run.url}")

    def log(self, row: Mapping[str, Any]) -> None:
        """Report figures of a step."""
        if self._run is not None:
            self._run.log(dict(row))

    def show(self, name: str, figure: Path) -> None:
        """Report a picture."""
        import wandb

        if self._run is not None:
            self._run.log({f"figures/{name}": wandb.Image(str(figure))})

    def finish(self, summary: Mapping[str, Any], *, succeeded: bool) -> None:
        """End the run."""
        if self._run is None:
            return
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=0 if succeeded else 1)
        _stop_process()

    def _begin(self, info: RunInfo, run_id: str, mode: Mode) -> Any:
        import wandb

        settings: dict[str, Any] = {
            "silent": True,
            "console": "off",  # the terminal belongs to the progress bar
            "init_timeout": float(self._environment.get("WANDB_INIT_TIMEOUT", INIT_SECONDS)),
            "finish_timeout": FINISH_SECONDS,
            "disable_git": True,
            "x_disable_meta": True,  # it would send variables of the batch system
        }
        model, data = info.config["model"]["name"], info.config["data"]["name"]
        # A run of somebody else in this process stays what it is.
        return wandb.init(
            dir=str(info.folder),
            mode=mode,
            project=self._config.project,
            group=self._config.group or f"{model}-{data}",
            name=self._config.name or info.folder.name,
            tags=list(self._config.tags),
            config={**info.config, "topology": info.topology, "plan": info.plan},
            id=run_id,
            resume="allow" if self._is_resumed else None,
            reinit="create_new",
            settings=wandb.Settings(**{k: v for k, v in settings.items() if k in wandb.Settings.model_fields}),
        )

    def _choose_id(self, id_file: Path) -> str:
        """That of a W&B sweep, of the job that is resumed, or a new one."""
        given = self._environment.get("WANDB_RUN_ID")
        if given:
            return given
        if self._is_resumed and id_file.exists():
            return id_file.read_text(encoding="utf-8").strip()
        return secrets.token_hex(4)


def _stop_process() -> None:
    """End W&B's own process, unless somebody else in this one has a run."""
    import wandb

    if wandb.run is None:
        wandb.teardown()


def choose_mode(mode: Literal["auto", "online", "offline"], environment: Mapping[str, str]) -> Mode:
    """What `auto` means here: WANDB_MODE if it is set, else online if there is a key to log in with."""
    if mode != "auto":
        return mode
    given = environment.get("WANDB_MODE")
    if given in ("online", "offline", "disabled"):
        return cast(Mode, given)
    return "online" if has_key(environment) else "offline"


def has_key(environment: Mapping[str, str]) -> bool:
    """Whether an API key is configured, by a variable or in a netrc file."""
    if environment.get("WANDB_API_KEY"):
        return True
    home = Path(environment.get("HOME", "~")).expanduser()
    files = [Path(environment["NETRC"])] if environment.get("NETRC") else [home / ".netrc", home / "_netrc"]
    server = urlsplit(environment.get("WANDB_BASE_URL", DEFAULT_SERVER)).netloc
    for file in files:
        try:
            login = netrc.netrc(str(file)).authenticators(server)
            if login is not None and login[2]:
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
