"""The `mpc-dist` command as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mpc_dist import __version__
from mpc_dist.cli import EXIT_BAD_INPUT, main
from tests.conftest import ROOT

SMALL_GPT = "--model.num_blocks 3 --model.width 8 --data.context 8 --data.max_bytes 20000 --batch_size 2".split()


@pytest.mark.parametrize(
    "argv",
    [
        ["--config", "configs/res_mlp.yaml"],
        ["--config", "configs/res_linear.yaml", "--readout.kind", "project"],
        ["--config", "configs/gpt_stdlib.yaml", *SMALL_GPT],
        ["--config", "configs/resnet_digits.yaml", "--model.blocks_per_group", "1", "--training.precision", "float64"],
    ],
    ids=["res_mlp", "res_linear", "gpt", "resnet"],
)
def test_angles_writes_its_table_figure_and_numbers(argv, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    out = tmp_path / "deep" / "folder"
    assert main(["angles", *argv, "--angles.num_batches", "1", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "back-prop" in printed
    assert str(out / "angles.png") in printed.replace("\n", "")
    assert (out / "angles.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads((out / "angles.json").read_text())
    T = len(content["horizons"])
    assert content["horizons"] == list(range(1, T + 1))
    assert content["cosines"][-1] == pytest.approx(1, abs=1e-5)
    assert all(-1 <= cosine <= 1 + 1e-6 for cosine in content["cosines"])
    assert content["peak_bytes"] == sorted(content["peak_bytes"])


def test_the_same_command_gives_the_same_numbers(tmp_path):
    for name in ("a", "b"):
        assert main(["angles", *SMALL_GPT, "--out", str(tmp_path / name)]) == 0
    first, second = ((tmp_path / name / "angles.json").read_text() for name in ("a", "b"))
    assert first == second


def test_angles_runs_on_cifar(cifar: Path, tmp_path):
    argv = ["--config", str(ROOT / "configs" / "resnet62_cifar10.yaml"), "--batch_size", "2"]
    argv += ["--data.folder", str(cifar / "cifar-10-batches-py"), "--data.num_train_files", "1"]
    argv += ["--model.blocks_per_group", "1"]
    assert main(["angles", *argv, "--angles.num_batches", "1", "--out", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["angels"], "unknown command 'angels'; did you mean 'angles'?"),
        (["angles", "--model.name", "gtp"], "unknown model 'gtp'; did you mean 'gpt'?"),
        (["angles", "--angles.horizons", "[0]"], "horizon 0 sees no block ahead"),
        (["angles", "--data.name", "cifar10", "--data.folder", "nowhere"], "data.folder nowhere does not exist"),
        (["angles", "--model.name", "res_mlp"], "the data gives tokens; use model 'gpt'"),
        (["angles", "--readout.kind", "identity"], "identity readout at boundary 1 gives 128 features"),
        (["angles", "--batch_size", "99999999"], "batch size 99999999 is out of range"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_leaves_nothing_behind(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == EXIT_BAD_INPUT
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("out", ["{tmp}/file/below", "/proc/self"])
def test_an_unwritable_folder_is_said_before_the_measurement(out, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["angles", *SMALL_GPT, "--out", out.format(tmp=tmp_path)]) == EXIT_BAD_INPUT
    captured = capsys.readouterr()
    assert "mpc-dist: error: " in captured.err
    assert "angles (blocks)" not in captured.out


def test_back_propagation_is_always_among_the_reported_horizons(tmp_path):
    assert main(["angles", *SMALL_GPT, "--angles.horizons", "[1]", "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "angles.json").read_text())["horizons"] == [1, 3]


def test_a_model_without_a_gradient_is_an_error_not_a_perfect_angle(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a" * 5000)
    argv = ["angles", *SMALL_GPT, "--data.path", str(tmp_path / "a.txt"), "--data.unit", "characters"]
    assert main([*argv, "--out", str(tmp_path / "out")]) == EXIT_BAD_INPUT
    assert "is zero" in capsys.readouterr().err


def test_help_explains_every_field_of_the_chosen_family(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["angles", "--model.name", "resnet_cifar", "--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for expected in ("--model.blocks_per_group", "Residual blocks in each of the three groups", "--out", "Models: "):
        assert expected in text


def test_schedule_draws_prices_and_writes(tmp_path, capsys):
    argv = "schedule --stages 4 --horizon 2 --microbatches 4 --split".split()
    assert main([*argv, "--out", str(tmp_path / "a.svg"), "--text", str(tmp_path / "a.txt")]) == 0
    printed = capsys.readouterr().out
    assert "step time 16," in printed
    assert "R0" in printed
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    assert len((tmp_path / "a.txt").read_text().splitlines()) == 4


def test_demo_trains_both_and_draws_them(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    small = "--model.num_blocks 2 --model.width 8 --data.context 8 --data.max_bytes 20000 --training.steps 4".split()
    assert main(["demo", "--config", "configs/gpt_train.yaml", *small, "--out", str(tmp_path)]) == 0
    assert "h = 1 stage" in capsys.readouterr().out
    assert (tmp_path / "timelines.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "backprop" / "metrics-rank1.jsonl").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--horizon 9", "horizon 9 exceeds the 8 blocks"),
        ("", "sliding windows need --horizon, a number of stages; use 1..8"),
        ("--windows tumbling --horizon 0", "window size 0 sees no block ahead"),
        ("--horizon 2 --costs 1,2", "--costs has 2 entries for 8 stages"),
        ("--horizon 2 --microbatches 0", "number of micro-batches: 0 is out of range"),
        ("--horizon 2 --stages 0", "--stages 0 is out of range"),
        ("--horizon 2 --cap 0", "in-flight cap 0 is out of range"),
    ],
)
def test_a_schedule_that_cannot_be_built_is_said_in_one_line(argv, message, capsys):
    assert main(["schedule", *argv.split()]) == EXIT_BAD_INPUT
    assert message in capsys.readouterr().err


def test_help_version_and_no_command(capsys):
    assert main(["--help"]) == 0
    assert "angles" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out
    assert main([]) == EXIT_BAD_INPUT


def test_the_installed_command_runs():
    command = Path(sys.executable).with_name("mpc-dist")
    done = subprocess.run([command, "angels"], capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_BAD_INPUT
    assert done.stderr.startswith("mpc-dist: error: unknown command 'angels'; did you mean 'angles'? ")
