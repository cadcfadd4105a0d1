"""The typed configuration of every command: YAML files, overridden field by field on the command line.

A wrong key, type or value fails here, before any work, with the field's path and the nearest valid name.
"""

import dataclasses
import itertools
import re
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from mpc_dist.data import DATA, DataSource, TextData
from mpc_dist.models import GPT, MODELS, BlockModel
from mpc_dist.readout import ReadoutConfig
from mpc_dist.validation import check_whole, look_up, suggest
from mpc_dist.windows import check_horizon

# Fields are described by the string below each of them.
set_parsing_settings(docstring_parse_attribute_docstrings=True)


@dataclass(frozen=True)
class AnglesConfig:
    """How `mpc-dist angles` measures."""

    num_batches: int = 4
    """Batches over which cos(theta_h) is averaged."""
    horizons: tuple[int, ...] | None = None
    """Horizons to report, e.g. "[1,2,4]"; null: all. Back-propagation is always among them."""

    def __post_init__(self) -> None:
        check_whole("angles.num_batches", self.num_batches, minimum=1)


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on."""

    model: BlockModel = field(default_factory=GPT)
    """The network; `--model.name` chooses its family."""
    data: DataSource = field(default_factory=TextData)
    """The data set; `--data.name` chooses it."""
    readout: ReadoutConfig = field(default_factory=ReadoutConfig)
    """How a loss is read at interior boundaries."""
    angles: AnglesConfig = field(default_factory=AnglesConfig)
    """How `mpc-dist angles` measures."""
    batch_size: int = 32
    """Samples per batch."""
    seed: int = 0
    """What initial weights and the order of the data are drawn from."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of weights and states."""

    def __post_init__(self) -> None:
        for horizon in self.angles.horizons or ():
            check_horizon(horizon, self.model.num_blocks)
        check_whole("batch_size", self.batch_size, minimum=1)
        check_whole("seed", self.seed, minimum=0)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device 'cuda' is not available on this machine; use 'cpu' or 'auto'")

    @property
    def torch_device(self) -> torch.device:
        """The device that `device` means here."""
        return torch.device("cuda" if self.device != "cpu" and torch.cuda.is_available() else "cpu")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that `dtype` names."""
        return {"float32": torch.float32, "float64": torch.float64}[self.dtype]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as they would stand in a YAML file."""
        return dataclasses.asdict(self)


# Sections are dataclasses; the families' types depend on their `name`.
SECTIONS: dict[str, Any] = {
    entry.name: entry.default_factory
    for entry in dataclasses.fields(Config)
    if entry.default_factory is not dataclasses.MISSING
}
FAMILIES: dict[str, Mapping[str, type]] = {"model": MODELS, "data": DATA}


class ConfigParser:
    """Reads a `Config` and a command's own options from a command line.

    The families named in the YAML files or on the command line are found first; then every field of just those is an
    option, with its type, default and description in `--help`. A family named on the command line replaces the file's
    section if that describes another one.
    """

    def __init__(self, argv: Sequence[str], *, prog: str, description: str) -> None:
        self._argv = list(argv)
        self._files = {path: _read_yaml(Path(path)) for path in _option_values(self._argv, "config")}
        self._sections = _section_types(self._argv, list(self._files.values()))
        self.parser = ArgumentParser(
            prog=prog,
            description=f"{description} Models: {', '.join(MODELS)}. Data: {', '.join(DATA)}. The fields below are of "
            f"the chosen ones: give --model.name, --data.name or --config before --help to see others.",
            exit_on_error=False,
        )
        self.parser.add_argument(
            "--config", action="append", help="YAML file with any of the fields below; options override it."
        )
        self.parser.add_class_arguments(Config, skip=set(SECTIONS))
        for name, kind in self._sections.items():
            self.parser.add_class_arguments(kind, name)

    def parse(self) -> tuple[Config, Namespace]:
        """The configuration, and all parsed values for the command's own options."""
        values = self.parser.get_defaults()
        for path, content in self._files.items():
            kept = _keep_chosen(content, self._sections)
            _check_keys(kept, self._sections, path)
            try:
                values = self.parser.parse_object(kept, namespace=values)
            except ArgumentError as error:
                raise ValueError(f"{path}: {_explain(error, self.parser)}") from error
        try:
            values = self.parser.parse_args(self._argv, namespace=values)
        except ArgumentError as error:
            raise ValueError(_explain(error, self.parser)) from error
        plain = {entry.name: values[entry.name] for entry in dataclasses.fields(Config)}
        sections = {name: kind(**plain[name].as_dict()) for name, kind in self._sections.items()}
        return Config(**{**plain, **sections}), values


def _section_types(argv: list[str], contents: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The dataclass of each section; of a family, the one that was named last."""
    sections = dict(SECTIONS)
    for section, family in FAMILIES.items():
        inner = [content[section] for content in contents if isinstance(content.get(section), Mapping)]
        names = [fields["name"] for fields in inner if "name" in fields] + _option_values(argv, f"{section}.name")
        if names:
            sections[section] = look_up(section, names[-1], family)
    return sections


def _keep_chosen(content: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """The file's content without the sections of a family that was not chosen in the end."""

    def is_chosen(section: str, fields: Any) -> bool:
        named = fields.get("name") if section in FAMILIES and isinstance(fields, Mapping) else None
        return named is None or FAMILIES[section].get(named) is sections[section]

    return {key: value for key, value in content.items() if is_chosen(key, value)}


def _option_values(argv: list[str], name: str) -> list[str]:
    """Every value given to an option, as `--name value` or `--name=value`."""
    flag = f"--{name}"
    spaced = [value for option, value in itertools.pairwise(argv) if option == flag]
    return spaced + [word.removeprefix(f"{flag}=") for word in argv if word.startswith(f"{flag}=")]


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"config file {path} does not exist; the shipped ones are in configs/") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"config file {path} cannot be read: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ValueError(f"config file {path} holds a {type(content).__name__}; it must be a mapping of fields")
    return content


def _check_keys(content: Mapping[str, Any], sections: Mapping[str, Any], path: str) -> None:
    top = [entry.name for entry in dataclasses.fields(Config)]
    for key, value in content.items():
        if key not in top:
            raise ValueError(f"{path}: unknown key {key!r}; {suggest(key, top)}")
        if key not in sections:
            continue
        if not isinstance(value, Mapping):
            raise ValueError(f"{path}: {key} must be a mapping of fields, got {value!r}")
        known = [entry.name for entry in dataclasses.fields(sections[key])]
        for inner in value:
            if inner not in known:
                raise ValueError(f"{path}: unknown key '{key}.{inner}'; {suggest(inner, known)}")


def _explain(error: ArgumentError, parser: ArgumentParser) -> str:
    """The library's message on one line, with the nearest valid option for an unknown one."""
    message = re.sub(r"<class '(\w+)'>", r"\1", " ".join(str(error).split()))
    marker = "unrecognized arguments: "
    if marker in message:
        option = message.partition(marker)[2].split()[0].partition("=")[0]
        known = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
        return f"unknown option {option!r}; {suggest(option, known)}"
    return message
