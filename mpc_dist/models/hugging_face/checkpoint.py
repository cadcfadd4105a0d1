"""Reads configurations and single tensors of models in local folders or on the hub; only safetensors, never pickles."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from mpc_dist.validation import suggest

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NEEDS = "model 'hf' needs transformers; pip install 'mpc_dist[hf]'"


def read_config(path: str | None, architecture: str | None, overrides: Mapping[str, Any]) -> Any:
    """The transformers configuration of a path, or of an architecture by its name, with some fields changed."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ValueError(NEEDS) from error
    read: Callable[..., Any]
    if path is None:
        assert architecture is not None
        read, where = partial(AutoConfig.for_model, architecture), architecture
    else:
        # The file is found first: transformers' own words for a missing one run over many lines.
        read, where = partial(AutoConfig.from_pretrained, find_file(path, "config.json").parent), f"{path}/config.json"
    config = _parse(read, {}, f"{where} is no configuration that transformers reads")
    known = {*config.to_dict(), *config.attribute_map, "num_labels"}
    for name in overrides:
        if name not in known:
            raise ValueError(f"unknown key 'model.overrides.{name}'; {suggest(name, known)}")
    return _parse(read, overrides, f"model.overrides do not fit {where}") if overrides else config


def _parse(read: Callable[..., Any], fields: Mapping[str, Any], complaint: str) -> Any:
    try:
        return read(**fields)
    except Exception as error:  # transformers checks configurations with exception types of its own
        raise ValueError(f"{complaint}: {_in_one_line(error)}") from error


def find_file(path: str, name: str) -> Path:
    """A file of a model: in a local folder, or fetched from the hub into its cache."""
    file = _find(path, name)
    if file is None:
        folder = Path(path)
        held = sorted(one.name for one in folder.iterdir()) if folder.is_dir() else []
        found = f"; it has {', '.join(held[:8]) or 'no files'}" if folder.is_dir() else ""
        raise ValueError(f"model.path {path} has no {name}{found}: give a folder of save_pretrained or a hub id")
    return file


def _find(path: str, name: str, *, is_optional: bool = False) -> Path | None:
    """As `find_file`; None if the model has no such file, or an optional one cannot be had now."""
    folder = Path(path)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError as error:
        raise ValueError(NEEDS) from error
    try:
        return Path(hf_hub_download(path, name))
    except HFValidationError as error:
        raise ValueError(
            f"model.path {path} is neither a folder nor a hub id; give a folder of save_pretrained, or an id such as "
            "openai-community/gpt2"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"model.path {path} is no folder, and the hub has no model of that id that you may read; check the id, or "
            "log in with `hf auth login` if it is private or gated"
        ) from error
    except LocalEntryNotFoundError as error:
        if is_optional:
            return None
        raise ValueError(
            f"model.path {path} is no folder, and as a hub id its {name} is not in the local cache and the hub cannot "
            f"be reached; check the id and the connection, or give a local folder"
        ) from error
    except EntryNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"model.path {path}: {name} cannot be fetched from the hub: {_in_one_line(error)}") from error


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a model, in one file or several, read one by one."""

    path: str
    """A local folder or a hub id."""

    @cached_property
    def _file_of(self) -> dict[str, str]:
        """The file that holds each tensor."""
        is_whole = _find(self.path, WEIGHTS, is_optional=True) is not None
        index = None if is_whole else _find(self.path, INDEX, is_optional=True)
        if index is not None:
            try:
                files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                if not all(isinstance(file, str) and Path(file).name == file for file in files.values()):
                    raise ValueError("it names files outside its folder")
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise ValueError(f"{index} is no index of weight files: {_in_one_line(error)}") from error
            return dict(files)
        with self._open(WEIGHTS) as file:
            return dict.fromkeys(file.keys(), WEIGHTS)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    @property
    def names(self) -> Iterable[str]:
        """Of all tensors."""
        return self._file_of.keys()

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These tensors and no others."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self._file_of[name], []).append(name)
        found = {}
        for file, wanted in by_file.items():
            with self._open(file) as opened:
                for name in wanted:
                    try:
                        found[name] = opened.get_tensor(name)
                    except Exception as error:  # the index and the file disagree
                        raise ValueError(f"{self.path}/{file} has no tensor {name}: {_in_one_line(error)}") from error
        return found

    def _open(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        file = find_file(self.path, name)
        try:
            return safe_open(file, "pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"weights {file} cannot be read: {_in_one_line(error)}; save or fetch them again"
            ) from error


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
