"""What is secret in the environment stays there: not in logs, reports, W&B's files or crash messages."""

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

NAMES = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_TOKEN")
OPTIONS = (
    "--model.name gpt --model.num_blocks 2 --model.width 8 --model.num_heads 2 --data.context 8 --data.max_bytes 4000 "
    "--batch_size 4 --training.steps 3 --training.log_every 1 --training.eval_batches 1 --device cpu --tracking.wandb "
    "true --tracking.mode offline"
)


def find_secrets(folder: Path, texts: dict[str, bytes], words: dict[str, str]) -> list[str]:
    """Where any of the words stands: in a file below the folder, its name, or one of the texts."""
    contents = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    contents |= {f"{path} (name)": str(path).encode() for path in folder.rglob("*")}
    return [
        f"{name} in {place}"
        for place, content in {**contents, **texts}.items()
        for name, word in words.items()
        if word.encode() in content or word[::-1].encode() in content
    ]


def test_a_secret_that_is_written_is_found(tmp_path: Path):
    (tmp_path / "log").write_text("key=abc123")
    assert find_secrets(tmp_path, {"stdout": b"xabc123x"}, {"KEY": "abc123"}) == [
        f"KEY in {tmp_path}/log",
        "KEY in stdout",
    ]


@pytest.mark.parametrize(
    "fails", [pytest.param(False, marks=pytest.mark.slow), True], ids=["a run that ends well", "a run that fails"]
)
def test_no_secret_of_the_environment_is_written_anywhere(fails: bool, tmp_path: Path):
    words = {name: secrets.token_hex(20) for name in NAMES}  # 40 characters, as W&B's keys have
    home = tmp_path / "home"
    home.mkdir()
    environment = {**os.environ, **words, "OMP_NUM_THREADS": "1", "HOME": str(home), "PYTHONPATH": str(ROOT)}
    run = tmp_path / "run"
    if fails:
        run.mkdir()
        (run / "checkpoints").write_text("a file where the folder should be")
    command = [sys.executable, "launch/train.py", *OPTIONS.split(), "--training.folder", str(run)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=250)
    assert ended.returncode == (2 if fails else 0), ended.stderr
    assert list(run.rglob("*.wandb")), "it was tracked"
    show = "import sys; from mpc_dist.cli import main; sys.exit(main())"
    page = subprocess.run(
        [sys.executable, "-c", show, "report", str(run)], cwd=ROOT, env=environment, capture_output=True, timeout=250
    )
    assert page.returncode == 0, page.stderr
    assert (run / "report.html").is_file()
    texts = {"stdout": ended.stdout + page.stdout, "stderr": ended.stderr + page.stderr}
    assert find_secrets(tmp_path, texts, words) == []
