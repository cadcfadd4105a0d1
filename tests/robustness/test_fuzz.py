"""Whatever a config, a plan, a checkpoint or a data file holds: one line and exit code 2, or a valid run.

Never a traceback, a hang, a huge allocation, code of the input run, or a run folder left behind.
"""

import pickle
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.robustness import entry
from tests.robustness.fuzz import KINDS, Ran, run_case
from tests.robustness.workshop import PLANNING, WORDS, Workshop, build_workshop, copy_run

NUM_QUICK = 6 * len(KINDS)
NUM_ALL = 2_250


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return build_workshop(tmp_path_factory.mktemp("workshop"))


def judge(shop: Workshop, numbers: range, folder: Path) -> None:
    outcomes = [run_case(shop, number, folder / "case") for number in numbers]
    failures = [f"case {one.number}, {one.kind}, {one.what}: {one.failure}" for one in outcomes if one.failure]
    assert not failures, f"{len(failures)} of {len(outcomes)}:\n" + "\n".join(failures)
    # A fuzzer that only ever makes garbage, or none, would find nothing.
    codes = Counter(one.answer.code for one in outcomes)
    assert set(codes) == {0, 2}
    assert min(codes.values()) > len(outcomes) // 20


def test_a_few_spoilt_inputs_are_refused_in_one_line(shop: Workshop, tmp_path: Path):
    judge(shop, range(NUM_QUICK), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))
def test_thousands_of_spoilt_inputs_are_refused_in_one_line(part: int, shop: Workshop, tmp_path: Path):
    size = NUM_ALL // 10
    judge(shop, range(NUM_QUICK + part * size, NUM_QUICK + (part + 1) * size), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model.width 1000000000000", "model.width 1000000000000 is out of range"),
        ("--model.width 4194304", "model: the weights and gradients of blocks 0..0 would take .* TiB, but there are"),
        ("--model.num_blocks 1000000000", "model.num_blocks 1000000000 is out of range; use 1..4096"),
        ("--training.steps 1" + "0" * 30, "training.steps 10+ is out of range"),
        ("--optimizer.lr nan", '"optimizer.lr": Expected a float. Got value: nan'),
        ("--optimizer.lr 1e400", "optimizer.lr must be a finite number, got inf"),
        ("--optimizer.lr 1" + "0" * 400, "optimizer.lr .* is too large for a number"),
        ("--batch_size 1000000000", "batch_size 1000000000|batch size 1000000000"),
        ("--data.context 100000", "too few for a data.context of 100000"),
        ("--seed 4294967296", "seed 4294967296 is out of range; use 0..4294967295"),
        ("--seed -1", "seed -1 is out of range"),
        ("--parallel.timeout 1e300", r"parallel.timeout 1e\+300 is out of range"),
        ("--parallel.partition [1,5]", "parallel.partition has 2 stages but parallel.stages is 1"),
        ("--parallel.partition [7]", "parallel.partition: partition 7 has 7 blocks but the model 2"),
        ("--parallel.stages 1000000000000", "parallel.stages: number of stages: 1000000000000 is out of range"),
        ("--parallel.microbatches 1000000000000", "cannot be cut into 1000000000000 equal micro-batches"),
        ("--horizon.windows sliding --horizon.size 1000000000000", "horizon.size 1000000000000 exceeds"),
        ("--model.name res_mlp --data.name linear --data.num_train 1000000000000", "data.num_train 10+ .*TiB, but"),
        ("--model.name res_mlp --data.name linear --data.dimension 1000000000", "data.dimension 10+ would take"),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_allocated(options: str, message: str, shop: Workshop, tmp_path):
    base = shop.gpt if "res_mlp" not in options else []
    answer = entry.train(*base, *options.split(), "--training.folder", str(tmp_path / "run"))
    assert (answer.code, answer.failure) == (2, None)
    assert re.search(message, answer.error), answer.error
    assert not (tmp_path / "run").exists()


def test_no_file_that_is_read_can_run_code(shop: Workshop, tmp_path: Path):
    witness = tmp_path / "ran"
    evil = pickle.dumps(Ran(witness))
    with pytest.raises(Exception):  # noqa: B017, PT011
        pickle.loads(pickle.dumps(Ran(Path("/proc/nowhere"))))  # it would run
    (checkpoint,) = copy_run(shop, tmp_path / "run", keep=1)
    places = {name: tmp_path / name for name in ("config.yaml", "plan.yaml", "text.txt", "resnet.th", "angles.json")}
    places |= {name: tmp_path / "cifar" / name for name in ("data_batch_1", "test_batch")}
    places |= {f"{kind}.png": tmp_path / "pictures" / kind / "1.png" for kind in ("cat", "dog")}
    for path in places.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(evil)
    resnet = [*WORDS["resnet"].split(), "--training.folder", str(tmp_path / "out")]
    cifar = ["--data.name", "cifar10", "--data.num_train_files", "1", "--data.folder"]
    answers = {
        "config": entry.train("--config", str(places["config.yaml"])),
        "plan": entry.train(*shop.gpt, "--plan", str(places["plan.yaml"])),
        "CIFAR": entry.train(*resnet, *cifar, str(tmp_path / "cifar")),
        "pictures": entry.train(*resnet, "--data.name", "image_folder", "--data.folder", str(tmp_path / "pictures")),
        ".th": entry.train(*resnet, *cifar, str(shop.cifar), "--model.checkpoint", str(places["resnet.th"])),
        "angles": entry.mpc_dist(
            "plan",
            *shop.gpt,
            *PLANNING.split(),
            "--angles-file",
            str(places["angles.json"]),
            "--out",
            str(tmp_path / "p"),
        ),
    }
    for path in [*checkpoint.iterdir(), *(tmp_path / "run").glob("*.jsonl"), tmp_path / "run" / "config.yaml"]:
        kept = path.read_bytes()
        path.write_bytes(evil)
        command = ["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]
        if "metrics" not in path.name:
            command = ["export", str(tmp_path / "run"), "--to", str(tmp_path / "exported")]
        answers[path.name] = entry.mpc_dist(*command)
        path.write_bytes(kept)
    assert {name: (answer.code, answer.failure) for name, answer in answers.items()} == dict.fromkeys(
        answers, (2, None)
    )
    assert not witness.exists()
