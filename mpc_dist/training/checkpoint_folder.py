"""The folder of a run's checkpoints: which are complete and undamaged, how one is committed, which are kept.

A checkpoint is written beside, under a name that ends in `.partial`, and renamed when all of it is on disk. So whatever
carries the final name was complete; checksums tell whether it still is.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpc_dist.document import MAX_BYTES, read_json
from mpc_dist.plain_value import build
from mpc_dist.training.tensor_files import Entry
from mpc_dist.validation import check_whole, show

STATE_FILE = "state.json"
FORMAT = 3
"""2: it carries a checksum of itself; 3: it tells which tensor is in which file."""
READABLE = (2, 3)
MOST_INDEX_BYTES = MAX_BYTES // 2
"""A larger index is left out, since the state must be readable; then whoever goes on opens every file."""
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial"
_REPLACED = ".replaced"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Digest:
    """What a file must contain."""

    sha256: str
    size: int
    """Bytes."""

    @classmethod
    def of(cls, path: Path) -> "Digest":
        """Of a file as it is on disk."""
        digest, size = hashlib.sha256(), 0
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
        return cls(digest.hexdigest(), size)


@dataclass(frozen=True)
class CheckpointState:
    """All that is not a tensor."""

    step: int
    num_replicas: int
    """Replicas of every stage that wrote it."""
    fingerprint: dict[str, Any]
    """What must agree for the weights to fit: the model and its task."""
    progress: dict[str, Any]
    """Where training stood: data, horizon, learning rate."""
    files: dict[str, Digest]
    """Its tensor files."""
    index: dict[str, dict[str, Entry]] | None = None
    """What each of them holds, by name; None: not known here."""


def folder_of(run: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run / "checkpoints"


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete ones, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which it was saved."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def partial_of(folder: Path, step: int) -> Path:
    """Where a checkpoint is written, beside the complete ones."""
    return folder / f"step-{step:08d}{_PARTIAL}"


def commit(partial: Path, state: CheckpointState, *, keep: int) -> Path:
    """Make what was written a checkpoint, and drop all but the newest `keep`."""
    content = asdict(state)
    if len(json.dumps(content["index"])) > MOST_INDEX_BYTES:
        content["index"] = None
    content = seal(content)
    with (partial / STATE_FILE).open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    final = partial.with_name(partial.name.removesuffix(_PARTIAL))
    if final.exists():  # a damaged one, or of an attempt that was left
        replaced = final.with_name(final.name + _REPLACED)
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial.rename(final)
    _sync_folder(final.parent)
    others = [path for path in list_checkpoints(final.parent) if path != final]
    for old in (*others[: len(others) + 1 - keep], *final.parent.glob(f"*{_REPLACED}")):
        shutil.rmtree(old, ignore_errors=True)
    return final


def seal(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a state file, with its format and the checksum by which a change is found."""
    plain = {"format": FORMAT, **content}
    text = json.dumps(plain, sort_keys=True)
    return {**plain, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def clear(folder: Path, *, after: int | None = None) -> None:
    """Remove what interrupted saves left, and checkpoints of later steps than `after`, if it is given."""
    left = [path for path in folder.glob("step-*") if path.name.endswith((_PARTIAL, _REPLACED))]
    later = [] if after is None else [path for path in list_checkpoints(folder) if step_of(path) > after]
    for path in (*left, *later):
        shutil.rmtree(path, ignore_errors=True)


def read_state(checkpoint: Path) -> CheckpointState:
    """What a checkpoint says of itself."""
    path = checkpoint / STATE_FILE
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
        if content.get("format") not in READABLE:
            readable = " and ".join(map(str, READABLE))
            raise ValueError(f"it has format {show(content.get('format'))}, this version reads {readable}")
        checksum = content.pop("sha256", None)
        if checksum != seal(content)["sha256"]:
            raise ValueError("it is not what was written")
        del content["format"]
        state = build(CheckpointState, content)
        check_whole("step", state.step, minimum=1)
        check_whole("num_replicas", state.num_replicas, minimum=1)
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint {checkpoint} cannot be read: {path.name}: {error}") from error
    unknown = sorted((state.index or {}).keys() - state.files.keys())
    if unknown:
        raise ValueError(f"checkpoint {checkpoint} has tensors in a file that it does not name: {show(unknown[0])}")
    bad = next((name for name in state.files if Path(name).name != name), None)
    if bad is not None:
        raise ValueError(f"checkpoint {checkpoint} names a file outside of it: {show(bad)}")
    return state


def find_damage(checkpoint: Path, *, part: int = 0, num_parts: int = 1) -> str | None:
    """What is wrong with a checkpoint's files, if anything; several readers may check a part of them each."""
    try:
        state = read_state(checkpoint)
    except ValueError as error:
        return str(error)
    strange = {path.name for path in checkpoint.glob("*.safetensors")} - state.files.keys()
    if strange:
        return f"checkpoint {checkpoint} is damaged: {min(strange)} does not belong to it"
    for name in sorted(state.files)[part::num_parts]:
        try:
            found = Digest.of(checkpoint / name)
        except OSError as error:
            return f"checkpoint {checkpoint} cannot be read: {error}"
        if found != state.files[name]:
            return f"checkpoint {checkpoint} is damaged: {name} is not what was written"
    return None


def _sync_folder(folder: Path) -> None:
    """A rename is safe from a power cut once its folder is on disk."""
    with contextlib.suppress(OSError):  # not every file system can
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
