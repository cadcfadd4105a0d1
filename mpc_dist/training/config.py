"""The typed configuration of every command: YAML files, overridden field by field on the command line.

A wrong key, type or value fails here, before any work, with the field's path and the nearest valid name.
"""

import argparse
import dataclasses
import json
import re
from argparse import SUPPRESS, ArgumentError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from mpc_dist.data import DATA, MAX_SEED, DataSource, TextData
from mpc_dist.document import read_yaml
from mpc_dist.models import GPT, MODELS, BlockModel
from mpc_dist.models.hugging_face import LoraConfig, adapt
from mpc_dist.readout import ReadoutConfig
from mpc_dist.schedule import split_evenly
from mpc_dist.schedule.layout import check_partition
from mpc_dist.training.sections import (
    CheckpointsConfig,
    DataParallelConfig,
    HorizonConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
    plain_windows,
)
from mpc_dist.training.tracking import TrackingConfig
from mpc_dist.validation import check_whole, is_whole, look_up, named, show, suggest
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
        if self.horizons is not None and not self.horizons:
            raise ValueError("angles.horizons is empty; list some, or leave it out for all")


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on."""

    model: BlockModel = field(default_factory=GPT)
    """The network; `--model.name` chooses its family."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters for model 'hf'."""
    data: DataSource = field(default_factory=TextData)
    """The data set; `--data.name` chooses it."""
    readout: ReadoutConfig = field(default_factory=ReadoutConfig)
    """How a loss is read at interior boundaries."""
    angles: AnglesConfig = field(default_factory=AnglesConfig)
    """How `mpc-dist angles` measures."""
    horizon: HorizonConfig = field(default_factory=HorizonConfig)
    """Which block learns from which loss."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the model is spread over ranks."""
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    """How many replicas of every stage there are."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """How weights are updated."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """How long to train, and what is done on the way."""
    checkpoints: CheckpointsConfig = field(default_factory=CheckpointsConfig)
    """What is kept of a run to go on later."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Where a run is reported besides its metrics files."""
    batch_size: int = 32
    """Samples per batch and replica."""
    seed: int = 0
    """What initial weights and the order of the data are drawn from."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        for horizon in self.angles.horizons or ():
            with named(f"angles.horizons with model.num_blocks {self.model.num_blocks}"):
                check_horizon(horizon, self.model.num_blocks)
        adapt(self.model, self.lora)
        check_whole("batch_size", self.batch_size, minimum=1)
        with named("parallel.stages" if self.parallel.partition is None else "parallel.partition"):
            check_partition(self.partition, self.model.num_blocks)
        self.horizon.build(self.partition)
        if self.batch_size % self.parallel.microbatches:
            raise ValueError(
                f"batch_size {self.batch_size} cannot be cut into {self.parallel.microbatches} equal micro-batches; "
                "use a multiple of parallel.microbatches"
            )
        check_whole("seed", self.seed, minimum=0, maximum=MAX_SEED)
        self._check_sharding()
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device 'cuda' is not available on this machine; use 'cpu' or 'auto'")

    def _check_sharding(self) -> None:
        zero = self.data_parallel.read_zero()
        if zero is None:
            return
        zero.check_clipping(self.training.clip_norm)
        if self.optimizer.name == "muon":
            raise ValueError(
                "optimizer.name muon updates whole matrices, which data_parallel.sharding deepspeed cuts up; use "
                "adamw, or sharding none"
            )
        if self.horizon.mode == "adaptive":
            raise ValueError(
                "horizon.mode adaptive adds readouts while training, which data_parallel.sharding deepspeed cannot "
                "take into its optimizer; use another mode, or sharding none"
            )
        if self.training.on_nonfinite == "skip" or self.training.build_loss_scale() is not None:
            raise ValueError(
                "data_parallel.sharding deepspeed cannot leave out a step; use training.on_nonfinite stop or ignore, "
                "and no loss scale (float16 has one)"
            )
        if self.torch_dtype != torch.float32:
            wrong = (
                "bfloat16_weights true" if self.training.bfloat16_weights else f"precision {self.training.precision}"
            )
            raise ValueError(
                f"data_parallel.sharding deepspeed keeps weights in float32, got training.{wrong}; use training."
                "precision float32 or bfloat16 with float32 weights"
            )

    @property
    def trained_model(self) -> BlockModel:
        """The network, with its adapters if it has any."""
        return adapt(self.model, self.lora)

    @property
    def partition(self) -> tuple[int, ...]:
        """Blocks of each stage."""
        return self.parallel.partition or split_evenly(self.model.num_blocks, self.parallel.stages)

    @property
    def num_ranks(self) -> int:
        """How many processes the launcher must start."""
        return self.parallel.stages * self.data_parallel.degree

    @property
    def torch_device(self) -> torch.device:
        """The device that `device` means here."""
        return torch.device("cuda" if self.device != "cpu" and torch.cuda.is_available() else "cpu")

    @property
    def torch_dtype(self) -> torch.dtype:
        """That of weights, states and inputs."""
        return self.training.build_precision().weights

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as they would stand in a YAML file."""
        return dataclasses.asdict(self)

    def as_yaml(self) -> str:
        """A file that `--config` reads as this very configuration."""
        plain = json.loads(json.dumps(self.as_dict()))  # tuples become lists
        return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


# Sections are dataclasses; the families' types depend on their `name`.
SECTIONS: dict[str, Any] = {
    entry.name: entry.default_factory
    for entry in dataclasses.fields(Config)
    if entry.default_factory is not dataclasses.MISSING
}
FAMILIES: dict[str, Mapping[str, type]] = {"model": MODELS, "data": DATA}


class ConfigParser:
    """Reads a `Config` and a command's own options from a command line.

    The files and families that it names are found first; then every field of just those families is an option, with its
    type, default and description in `--help`. A family named on the command line replaces a file's section of another.
    """

    def __init__(self, argv: Sequence[str], *, prog: str, description: str) -> None:
        chosen, self._argv = _choose(argv)
        self._files = [(path, _read_yaml(Path(path))) for path in chosen.config]
        self._sections = _section_types(self._files, vars(chosen))
        self.parser = ArgumentParser(
            prog=prog,
            description=f"{description} Models: {', '.join(MODELS)}. Data: {', '.join(DATA)}. The fields below are of "
            f"the chosen ones: give --model.name, --data.name or --config before --help to see others.",
            exit_on_error=False,
            allow_abbrev=False,
        )
        # Taken out of the command line by now; here for --help.
        self.parser.add_argument(
            "--config", help="YAML file with any of the fields below; later files and all options override it."
        )
        self.parser.add_class_arguments(Config, skip=set(SECTIONS))
        for name, kind in self._sections.items():
            self.parser.add_class_arguments(kind, name)
        for action in self.parser._actions:
            # The library's own extras: a file per section, and shell completion.
            if action.option_strings and action.option_strings[0] in _unsupported_options():
                action.help = SUPPRESS

    def given(self) -> dict[str, str]:
        """The fields that files or the command line give, by their path, and where."""
        found: dict[str, str] = {}
        for path, content in self._files:
            for key, value in content.items():
                inner = value if key in SECTIONS and isinstance(value, Mapping) else ()
                found |= dict.fromkeys([key, *(f"{key}.{name}" for name in inner)], path)
        options = [word.partition("=")[0] for word in self._argv if word.startswith("--")]
        return found | {option.removeprefix("--"): option for option in options}

    def parse(self) -> tuple[Config, Namespace]:
        """The configuration, and all parsed values for the command's own options."""
        values = self.parser.get_defaults()
        for path, content in self._files:
            kept = _keep_chosen(content, self._sections)
            _check_keys(kept, self._sections, path)
            try:
                values = self.parser.parse_object(kept, namespace=values)
            except OverflowError as error:
                raise ValueError(f"{path}: {_name_longest(_list_values(kept))} is too large for a number") from error
            except (ArgumentError, RecursionError) as error:
                raise ValueError(f"{path}: {_explain(error, self.parser)}") from error
        for extra in self._argv:
            _check_renamed(extra.partition("=")[0].removeprefix("--"), "command line")
            if extra.partition("=")[0] not in _unsupported_options() and not extra.startswith("--config."):
                continue
            raise ValueError(f"unknown option {extra!r}; give a file by --config, or fields such as --model.name")
        try:
            values = self.parser.parse_args(self._argv, namespace=values)
        except OverflowError as error:
            given = [word.partition("=") for word in self._argv]
            before = ["", *self._argv]  # an option and its value may be two words
            options = [
                (option if sign else last, value or option)
                for (option, sign, value), last in zip(given, before, strict=False)
            ]
            longest = _name_longest([(option.lstrip("-"), value) for option, value in options])
            raise ValueError(f"{longest} is too large for a number") from error
        except (ArgumentError, RecursionError) as error:
            raise ValueError(_explain(error, self.parser)) from error
        plain = {entry.name: values[entry.name] for entry in dataclasses.fields(Config)}
        _check_given({name: value for name, value in plain.items() if name not in SECTIONS}, Config, "")
        sections = {}
        for name, kind in self._sections.items():
            fields = plain[name].as_dict()
            _check_given(fields, kind, f"{name}.")
            sections[name] = kind(**fields)
        return Config(**{**plain, **sections}), values


def _choose(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The files and families that a command line names, in order, and the rest of it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append", default=[])
    for section in FAMILIES:
        parser.add_argument(f"--{section}.name", dest=section)
    parser.add_argument("--horizon", type=_read_horizon)
    try:
        chosen, rest = parser.parse_known_args(argv)
    except ArgumentError as error:
        raise ValueError(str(error)) from error
    if chosen.horizon is not None:
        rest += [f"--horizon.{name}={value}" for name, value in _short_horizon(chosen.horizon).items()]
    return chosen, rest


AUTO = "auto"


def _read_horizon(word: str) -> int | str:
    return AUTO if word == AUTO else int(word)


def _short_horizon(value: int | str) -> dict[str, Any]:
    """What the short forms `horizon: 2` and `horizon: auto` stand for."""
    if isinstance(value, str):
        return {"mode": AUTO}
    return {"windows": plain_windows(value), "size": value, "unit": "stages"}


def _unsupported_options() -> set[str]:
    return {f"--{section}" for section in SECTIONS} | {"--print_shtab"}


def _section_types(files: list[tuple[str, Mapping[str, Any]]], named: Mapping[str, Any]) -> dict[str, Any]:
    """The dataclass of each section; of a family, the one that was named last."""
    sections = dict(SECTIONS)
    for section, family in FAMILIES.items():
        inner = [content[section] for _, content in files if isinstance(content.get(section), Mapping)]
        names = [fields["name"] for fields in inner if "name" in fields]
        if named[section] is not None:
            names.append(named[section])
        for name in names:
            sections[section] = look_up(section, name, family)
    return sections


def _keep_chosen(content: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """The file's content without the sections of a family that was not chosen in the end."""

    def is_chosen(section: str, fields: Any) -> bool:
        named = fields.get("name") if section in FAMILIES and isinstance(fields, Mapping) else None
        return named is None or FAMILIES[section].get(named) is sections[section]

    return {key: value for key, value in content.items() if is_chosen(key, value)}


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        content = read_yaml(path)
    except FileNotFoundError as error:
        raise ValueError(f"config file {path} does not exist; the shipped ones are in configs/") from error
    except (OSError, ValueError) as error:  # a path may not even be one
        raise ValueError(f"config file {path} cannot be read: {error}") from error
    if content is None:
        return {}
    if isinstance(content, Mapping) and (is_whole(content.get("horizon")) or content.get("horizon") == AUTO):
        return {**content, "horizon": _short_horizon(content["horizon"])}
    if not isinstance(content, Mapping):
        raise ValueError(f"config file {path} holds a {type(content).__name__}; it must be a mapping of fields")
    return content


def _check_keys(content: Mapping[str, Any], sections: Mapping[str, Any], path: str) -> None:
    top = [entry.name for entry in dataclasses.fields(Config)]
    for key, value in content.items():
        _check_renamed(key, path)
        if key not in top:
            raise ValueError(f"{path}: unknown key {show(key)}; {suggest(key, top)}")
        if key not in sections:
            continue
        if not isinstance(value, Mapping):
            raise ValueError(f"{path}: {key} must be a mapping of fields, got {show(value)}")
        known = [entry.name for entry in dataclasses.fields(sections[key])]
        for inner in value:
            _check_renamed(f"{key}.{inner}", path)
            if inner not in known:
                raise ValueError(f"{path}: unknown key '{key}.{inner}'; {suggest(inner, known)}")


_TYPES = "training.precision: float64, float32, bfloat16 or float16"
RENAMED = {"dtype": _TYPES, "training.autocast": _TYPES, "training.autocast_dtype": _TYPES}
"""Fields of before, and what says the same now."""


def _check_renamed(name: str, path: str) -> None:
    if name in RENAMED:
        raise ValueError(f"{path}: there is no {name} any more; write {RENAMED[name]}")


def _check_given(values: Mapping[str, Any], kind: Any, prefix: str) -> None:
    """Raise if null was given to a field that does not take it."""
    hints = get_type_hints(kind)
    for name, value in values.items():
        if value is None and type(None) not in get_args(hints[name]):
            raise ValueError(f"{prefix}{name} may not be null; leave it out for its default")


def _list_values(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    """Every field of a file with its path."""
    found: list[tuple[str, object]] = []
    for key, value in content.items():
        found += _list_values(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return found


def _name_longest(values: Sequence[tuple[str, object]]) -> str:
    """The field with the longest value, and the value: the library does not say which one it could not convert."""

    def length(pair: tuple[str, object]) -> int:
        value = pair[1]
        if is_whole(value):
            return int(value).bit_length() // 3
        return len(value if isinstance(value, str) else show(value))

    name, value = max(values, key=length)
    return f"{name} {show(value)}"


def _explain(error: Exception, parser: ArgumentParser) -> str:
    """The library's message on one line, with the nearest valid option for an unknown one."""
    message = re.sub(r"<class '(\w+)'>", r"\1", " ".join(str(error).split()))
    union = re.search(r'key "(.*?)": Does not validate .* Subtypes: \[(.*)\] Errors: .* Given value: (.*)', message)
    if union:
        kinds = re.sub(r"typing\.Literal\[(.*?)\]", r"\1", union[2]).replace("NoneType", "null")
        return f"{union[1]} must be of type {kinds}, got {union[3]}; a list is written as [1,2,4]"
    marker = "unrecognized arguments: "
    if marker not in message:
        return message
    word = message.partition(marker)[2].split()[0].partition("=")[0]
    if not word.startswith("-"):
        return f"unexpected argument {word!r}; a config file is given by --config"
    known = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    return f"unknown option {word!r}; {suggest(word, set(known) - _unsupported_options())}"
