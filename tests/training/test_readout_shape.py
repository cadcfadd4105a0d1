"""A head's norm and depth, given on the command line, reach the ranks and their checkpoints."""

from pathlib import Path

import pytest
import yaml

from mpc_dist.training.checkpoint_folder import read_state
from mpc_dist.training.config import Config
from mpc_dist.training.planning import fingerprint
from mpc_dist.training.resume import Resume, weights_fingerprint
from tests.training.local import losses, parse, train_locally

SMALL = """--device cpu --model.num_blocks 2 --model.width 8 --model.num_heads 2 --data.context 8 --data.max_bytes 20000
    --batch_size 4 --training.steps 2 --training.log_every 1 --parallel.stages 2 --horizon 1""".split()
SHAPED = ["--readout.norm", "false", "--readout.depth", "2"]


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config]:
    folder = tmp_path_factory.mktemp("shaped")
    return folder, train_locally([*SMALL, *SHAPED], folder)


def test_ranks_train_the_heads_that_are_configured(shaped: tuple[Path, Config], tmp_path: Path):
    folder, _ = shaped
    train_locally(SMALL, tmp_path)
    ours, plain = losses(folder, 2), losses(tmp_path, 2)
    assert ours[1, "1", 0] != plain[1, "1", 0]
    assert (
        ours[1, "2", 0] == plain[1, "2", 0]
    )  # the last head is the model's own, and the first step's blocks are equal


def test_a_checkpoint_knows_its_heads(shaped: tuple[Path, Config]):
    folder, config = shaped
    (path,) = (folder / "checkpoints").glob("step*")
    assert read_state(path).fingerprint["readout"] == {"kind": "local", "norm": False, "depth": 2}
    with pytest.raises(ValueError, match=r"is of another readout: it has .*'depth': 2"):
        Resume(parse([*SMALL, "--training.folder", str(folder)]), rank=0)
    assert weights_fingerprint(config) != weights_fingerprint(parse(SMALL))
    assert fingerprint(config)["readout"] != fingerprint(parse(SMALL))["readout"]


def test_the_shape_survives_yaml(shaped: tuple[Path, Config], tmp_path: Path):
    _, config = shaped
    (tmp_path / "run.yaml").write_text(config.as_yaml())
    assert yaml.safe_load(config.as_yaml())["readout"] == {"kind": "local", "norm": False, "depth": 2}
    assert parse(["--config", str(tmp_path / "run.yaml")]).readout == config.readout
