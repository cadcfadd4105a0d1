"""Configuration: files, overrides, and one clear line for whatever is wrong with them."""

import json
from pathlib import Path

import pytest
import torch

from mpc_dist.data import LinearData, TextData, TrigonometricData
from mpc_dist.models import GPT, ResMLP
from mpc_dist.training.config import Config, ConfigParser
from tests.conftest import ROOT


def parse(*argv: str) -> Config:
    config, _ = ConfigParser(argv, prog="test", description="").parse()
    return config


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return str(path)


def test_defaults_need_no_file():
    assert parse() == Config()
    assert (parse().model, parse().data) == (GPT(), TextData())


def test_a_file_chooses_families_and_the_command_line_overrides_fields(tmp_path):
    path = write(tmp_path, "model: {name: res_mlp, width: 7}\ndata: {name: linear}\nbatch_size: 5\n")
    config = parse("--config", path, "--model.num_blocks", "4", "--batch_size=6", "--angles.horizons", "[1,3]")
    assert config.model == ResMLP(num_blocks=4, width=7)
    assert config.data == LinearData()
    assert config.batch_size == 6
    assert config.angles.horizons == (1, 3)


def test_later_files_override_earlier_ones(tmp_path):
    first = write(tmp_path, "model: {name: gpt, width: 16}\nseed: 1\n")
    second = tmp_path / "second.yaml"
    second.write_text("model: {width: 32}\n")
    config = parse("--config", first, "--config", str(second))
    assert config.model == GPT(width=32)
    assert config.seed == 1


def test_options_count_in_their_order_however_they_are_written(tmp_path):
    first = write(tmp_path, "seed: 1\n")
    second = tmp_path / "second.yaml"
    second.write_text("seed: 2\n")
    assert parse(f"--config={first}", "--config", str(second)).seed == 2
    assert parse("--config", str(second), f"--config={first}", "--config", str(second)).seed == 2
    assert parse("--model.name=gpt", "--model.name", "res_mlp").model == ResMLP()


def test_a_family_that_does_not_exist_is_named_even_if_another_replaces_it(tmp_path):
    path = write(tmp_path, "model: {name: gtp}\n")
    with pytest.raises(ValueError, match="unknown model 'gtp'"):
        parse("--config", path, "--model.name", "gpt")


def test_a_family_named_on_the_command_line_replaces_the_files_section(tmp_path):
    path = write(tmp_path, "model: {name: res_mlp, width: 7}\ndata: {name: linear, dimension: 3}\n")
    assert parse("--config", path, "--data.name", "trigonometric").data == TrigonometricData()
    assert parse("--config", path, "--data.name=linear").data == LinearData(dimension=3)


def test_a_config_survives_as_plain_values(tmp_path):
    config = parse("--model.name", "res_mlp", "--data.name", "linear", "--angles.horizons", "[2]")
    path = write(tmp_path, json.dumps(config.as_dict()))  # JSON is YAML
    assert parse("--config", path) == config


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_config_is_valid(path):
    config = parse("--config", str(path))
    assert config.model.num_blocks > 0
    assert str(path.relative_to(ROOT)) in path.read_text(), "a config shows the command that runs it"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {name: gtp}", "unknown model 'gtp'; did you mean 'gpt'?"),
        ("model: {name: 3}", "unknown model 3; .*known: gpt, hf, res_linear"),
        ("data: {name: txt}", "unknown data 'txt'; did you mean 'text'?"),
        ("model: {name: gpt, widht: 3}", r"config.yaml: unknown key 'model\.widht'; did you mean 'width'?"),
        ("batchsize: 3", "config.yaml: unknown key 'batchsize'; did you mean 'batch_size'?"),
        ("readout: {kind: locl}", r'config.yaml: .*"readout\.kind".*locl'),
        ("model: gpt", "config.yaml: model must be a mapping of fields, got 'gpt'"),
        ("model: {width: wide}", r'"model\.width".*Expected a int.*wide'),
        ("model: {width: 2.5}", r'"model\.width".*Expected a int.*2\.5'),
        ("model: {width: 0}", r"model\.width 0 is out of range; use 1\.\.16777216"),
        ("batch_size: -4", "batch_size -4 is out of range; use 1 or more"),
        ("seed: -1", "seed -1 is out of range"),
        ("angles: {num_batches: 0}", r"angles\.num_batches 0 is out of range"),
        ("angles: {horizons: [0]}", r"horizon 0 sees no block ahead; use 1\.\.8"),
        ("angles: {horizons: [9]}", r"angles.horizons with model.num_blocks 8: horizon 9 .*; use 1\.\.8"),
        ("angles: {horizons: [two]}", r"angles\.horizons must be of type .*two"),
        ("dtype: float64", "config.yaml: there is no dtype any more; write training.precision: float64"),
        ("training: {autocast: true}", "there is no training.autocast any more; write training.precision: float64, fl"),
        ("training: {autocast_dtype: float16}", "there is no training.autocast_dtype any more; write training.prec"),
        ("training: {bfloat16_weights: true}", "bfloat16_weights needs training.precision bfloat16, got float32"),
        ("training: {precision: int8}", r"training\.precision.*int8"),
        ("angles: {horizons: []}", r"angles\.horizons is empty"),
        ("angles: {horizons: 3}", r"angles\.horizons must be of type .*, got 3; a list is written as \[1,2,4\]"),
        ("readout: {kind: null}", r"readout\.kind may not be null"),
        ("device: null", "device may not be null"),
        ("data: {unit: null}", r"data\.unit may not be null"),
        ("model: {name: [gpt]}", r"unknown model \['gpt'\]"),
        ("seed: 1\nseed: 2", "key 'seed' is given twice"),
        (
            f"device: cpu\noptimizer: {{lr: 1{'0' * 400}}}\nbatch_size: 8",
            r"optimizer\.lr .* is too large",
        ),
        ("seed: 2001-99-99", "config.yaml cannot be read"),
        ("[" * 5000, "config.yaml cannot be read"),
        ("- a\n- b", "holds a list; it must be a mapping"),
        ("model: {name: gpt", "config.yaml cannot be read"),
        ("model: !!python/object/apply:os.system ['true']", "config.yaml cannot be read"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse("--config", write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_the_shortest_timeout_is_a_second():
    assert parse("--parallel.timeout", "1").parallel.timeout == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dtype", "float64"], "no dtype any more; write training.precision: float64, float32, bfloat16 or float16"),
        (
            ["--training.autocast=true"],
            "command line: there is no training.autocast any more; write training.precision",
        ),
        (["--config", "nowhere.yaml"], "config file nowhere.yaml does not exist; the shipped ones are in configs/"),
        (["--model.name", "gtp"], "unknown model 'gtp'; did you mean 'gpt'?"),
        (["--model.widht", "3"], "unknown option '--model.widht'; did you mean '--model.width'?"),
        (["--checkpoints.keep", "10000000000000"], r"checkpoints\.keep 10000000000000 is out of range"),
        (["--parallel.timeout", "0.5"], r"parallel\.timeout 0\.5 is out of range; use 1 <= "),
        (["--training.workers", "100000"], r"training\.workers 100000 is out of range"),
        (["--training.folder", ""], r"training\.folder '' can be no path"),
        (["--model.width=x"], r'"model\.width".*Expected a int.*x'),
        (["--batch_size"], "batch_size"),
        (["--conf", "x.yaml"], "unknown option '--conf'; did you mean '--config'?"),
        (["--config"], "--config: expected one argument"),
        (["--config.x", "3"], r"unknown option '--config\.x'"),
        (["--model", "x.yaml"], "unknown option '--model'; give a file by --config"),
        (["--data=x.yaml"], "unknown option '--data=x.yaml'"),
        (["configs/res_mlp.yaml"], "unexpected argument 'configs/res_mlp.yaml'; a config file is given by --config"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_said_in_one_line(argv, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse(*argv)
    assert "\n" not in str(caught.value)


def test_cuda_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="device 'cuda' is not available on this machine; use 'cpu' or 'auto'"):
        parse("--device", "cuda")
    assert parse("--device", "auto").torch_device.type == "cpu"


def test_a_precision_is_a_type_to_compute_in_and_one_of_weights():
    found = [parse("--training.precision", name) for name in ("float64", "float32", "bfloat16", "float16")]
    found.append(parse("--training.precision", "bfloat16", "--training.bfloat16_weights", "true"))
    types = [(one.training.build_precision().compute, one.torch_dtype) for one in found]
    half, whole = torch.bfloat16, torch.float32
    assert types == [(None, torch.float64), (None, whole), (half, whole), (torch.float16, whole), (None, half)]
    assert [one.training.build_loss_scale() is not None for one in found] == [False, False, False, True, False]
