"""The files of a checkpoint: each replica writes its share, and whoever goes on opens only what it needs."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from mpc_dist.bench.opens import Opens
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.runtime.state import Fragment, divide, read_fragment_name
from mpc_dist.runtime.tree import gather_objects
from mpc_dist.training.checkpoint import CheckpointSaver, SavedCheckpoint
from mpc_dist.training.checkpoint_folder import Digest, folder_of, list_checkpoints, read_state, seal
from mpc_dist.training.config import Config
from tests.training.local import parse, train_locally, train_rank

MLP = (
    "--model.name res_mlp --data.name trigonometric --data.num_train 400 --readout.kind pool --batch_size 12 "
    "--parallel.microbatches 2 --training.log_every 1 --training.eval_batches 1 --device cpu --training.steps 2"
).split()
ZERO = "--data_parallel.degree 2 --data_parallel.sharding deepspeed --data_parallel.stage 1".split()


def newest(folder: Path) -> Path:
    return list_checkpoints(folder_of(folder))[-1]


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_going_on_opens_as_many_files_on_each_rank_however_many_there_are(num_ranks: int, tmp_path: Path):
    arguments = [*MLP, *f"--parallel.stages {num_ranks} --model.num_blocks {num_ranks} --horizon 1".split()]
    train_locally(arguments, tmp_path)
    more = ["--training.steps", "3", "--checkpoints.every", "0", "--checkpoints.resume", str(newest(tmp_path))]
    with Opens(newest(tmp_path)) as opens:
        train_locally([*arguments, *more], tmp_path)
    tensors = {name: number for name, number in opens.count.items() if name.endswith(".safetensors")}
    assert len(tensors) == num_ranks
    # By one rank to check it; and for weights, optimizer state and random numbers by the one that needs them, each time
    # by the library's header reader and its mapping, which may count as one. No other rank opens it.
    assert all(4 <= number <= 7 for number in tensors.values())
    assert opens.count["state.json"] <= 4 * num_ranks


def collected(rank: int, config: Config) -> tuple[dict[str, int], int, dict[str, Tensor]]:
    """The bytes of what a rank copied for a checkpoint, what it holds, and its weights."""
    sizes: dict[str, int] = {}
    weights: dict[str, Tensor] = {}
    held = [0]
    collect = Pipeline.collect_state

    def collect_and_note(pipeline: Pipeline) -> dict[str, Tensor]:
        found = collect(pipeline)
        sizes.update({name: value.nbytes for name, value in found.items()})
        weights.update({name: p.detach().clone() for name, p in pipeline.named_parameters().items()})
        states = pipeline.stage.optimizer.state.values()
        held[0] = sum(v.nbytes for s in states for v in s.values() if isinstance(v, Tensor))
        return found

    Pipeline.collect_state = collect_and_note  # type: ignore[method-assign]
    train_rank(rank, config)
    return sizes, held[0], weights


def test_each_replica_copies_its_share_and_every_weight_is_written_once(tmp_path: Path):
    arguments = [*MLP, *"--model.num_blocks 4 --data_parallel.degree 2 --optimizer.name adamw".split()]
    answers = run_local_ranks(collected, 2, parse([*arguments, "--training.folder", str(tmp_path)]))
    names = [{name for name in sizes if not name.startswith("random.")} for sizes, _, _ in answers]
    assert not names[0] & names[1]
    shares = [sum(sizes[name] for name in own) for own, (sizes, _, _) in zip(names, answers, strict=True)]
    whole = sum(p.nbytes for p in answers[0][2].values()) + answers[0][1]
    assert sum(shares) == whole
    assert max(shares) < 0.55 * whole
    saved = SavedCheckpoint(newest(tmp_path))
    found = saved.read_all([name for name in saved.described if name.startswith(("blocks.", "readouts."))])
    for _, _, weights in answers:
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_the_parts_of_a_shared_optimizer_are_saved_as_they_are_and_read_by_any_layout(tmp_path: Path):
    arguments = [*MLP, *"--model.num_blocks 4 --optimizer.name adamw --training.precision float32".split()]
    zero = tmp_path / "zero"
    answers = run_local_ranks(collected, 2, parse([*arguments, *ZERO, "--training.folder", str(zero)]))
    for sizes, held, _ in answers:
        parts = [size for name, size in sizes.items() if name.startswith("optimizer.") and "@" in name]
        assert 0 < sum(parts) <= held, "more than this replica holds was copied"
    train_locally([*arguments, "--data_parallel.degree", "2"], tmp_path / "plain")
    shared, plain = SavedCheckpoint(newest(zero)), SavedCheckpoint(newest(tmp_path / "plain"))
    names = [name for name in plain.described if not name.startswith("random.")]
    assert set(names) == {name for name in shared.described if not name.startswith("random.")}
    one, other = shared.read_all(names), plain.read_all(names)
    for name in names:
        # float32, two steps: DeepSpeed adds in another order.
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-7, msg=name)
    after = {}
    for name, source, layout in (
        ("one process", zero, "--data_parallel.degree 1 --batch_size 24 --parallel.microbatches 4"),
        ("shared by three", zero, "--data_parallel.degree 3 --batch_size 8 --data_parallel.sharding deepspeed"),
        ("of the plain one", tmp_path / "plain", "--data_parallel.degree 1 --batch_size 24 --parallel.microbatches 4"),
    ):
        more = ["--training.steps", "4", "--checkpoints.resume", str(source)]
        train_locally([*arguments, *layout.split(), *more], tmp_path / name)
        saved = SavedCheckpoint(newest(tmp_path / name))
        after[name] = saved.read_all([name for name in saved.described if name.startswith("blocks.")])
    for name, values in after.items():
        for key, value in values.items():
            torch.testing.assert_close(value, after["one process"][key], rtol=1e-3, atol=1e-5, msg=f"{name} {key}")


def write_as_before(rank: int, folder: Path) -> None:
    tensors = {f"blocks.{rank}.weight": torch.full((2, 3), float(rank)), "blocks.9.weight": torch.ones(4)}
    save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def test_a_checkpoint_written_before_there_was_an_index_is_read(tmp_path: Path):
    checkpoint = tmp_path / "step-00000007"
    run_local_ranks(write_as_before, 2, checkpoint)
    files = {path.name: vars(Digest.of(path)) for path in checkpoint.glob("*.safetensors")}
    assert len(files) == 2
    content = {"format": 2, "step": 7, "num_replicas": 1, "fingerprint": {}, "progress": {}, "files": files}
    (checkpoint / "state.json").write_text(json.dumps(seal(content)))
    saved = SavedCheckpoint(checkpoint)
    found = saved.read_all(sorted(saved.described))
    assert list(found) == ["blocks.0.weight", "blocks.1.weight", "blocks.9.weight"]
    assert torch.equal(found["blocks.1.weight"], torch.ones(2, 3))
    assert torch.equal(found["blocks.9.weight"], torch.ones(4))


def save_alone(folder: Path) -> Path:
    saver = CheckpointSaver(folder, keep=1, fingerprint={})
    part = Fragment(torch.arange(4.0), 2, (2, 3))
    first = Fragment(torch.ones(2), 0, (2, 3))
    name = "optimizer.blocks.0.weight.exp_avg"
    saver.save(1, {first.name(name): first.tensor, part.name(name): part.tensor, "count": torch.tensor(3)}, {})
    saver.wait()
    (outcome,) = saver.take_outcomes()
    assert outcome.failure is None
    return folder / "step-00000001"


def test_parts_come_together_in_their_places(tmp_path: Path):
    saved = SavedCheckpoint(save_alone(tmp_path))
    found = saved.read_all(["optimizer.blocks.0.weight.exp_avg", "count"])
    assert found["optimizer.blocks.0.weight.exp_avg"].tolist() == [[1, 1, 0], [1, 2, 3]]
    assert found["count"].item() == 3


def read_everything(checkpoint: Path) -> None:
    saved = SavedCheckpoint(checkpoint)
    saved.read_all(list(saved.described))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held.pop("optimizer.blocks.0.weight.exp_avg@2:2x3"), "is not there as a whole"),
        (lambda held: held["count"].update(shape=[1 << 30]), "too small to hold what the index says"),
        (lambda held: held["count"].update(type="F31"), "unknown type of tensor 'F31'"),
        (lambda held: held["count"].update(type="F32"), "not as was written"),
        (lambda held: held.update(other={"type": "F32", "shape": []}), "cannot be read"),
    ],
)
def test_an_index_that_is_not_true_is_refused(change, message: str, tmp_path: Path):
    path = save_alone(tmp_path) / "state.json"
    content = json.loads(path.read_text())
    (held,) = content["index"].values()
    change(held)
    path.write_text(json.dumps(seal({key: value for key, value in content.items() if key != "sha256"})))
    with pytest.raises(OSError, match=message):
        read_everything(path.parent)


def test_a_tensor_in_a_file_that_has_no_checksum_is_refused(tmp_path: Path):
    path = save_alone(tmp_path) / "state.json"
    content = json.loads(path.read_text())
    content["index"]["other.safetensors"] = {}
    path.write_text(json.dumps(seal({key: value for key, value in content.items() if key != "sha256"})))
    with pytest.raises(ValueError, match=r"in a file that it does not name: 'other\.safetensors'"):
        read_state(path.parent)


@pytest.mark.parametrize("name", ["../weights.safetensors", "/etc/passwd", "deeper/weights.safetensors"])
def test_a_file_outside_of_the_checkpoint_is_refused(name: str, tmp_path: Path):
    path = save_alone(tmp_path) / "state.json"
    content = json.loads(path.read_text())
    content["files"][name] = next(iter(content["files"].values()))
    path.write_text(json.dumps(seal({key: value for key, value in content.items() if key != "sha256"})))
    with pytest.raises(ValueError, match="names a file outside of it"):
        read_state(path.parent)


def test_names_of_parts_are_read_back():
    for shape in ((), (3,), (2, 0, 4)):
        name = Fragment(torch.empty(0), 17, shape).name("optimizer.blocks.0.a@b.exp_avg")
        assert read_fragment_name(name) == ("optimizer.blocks.0.a@b.exp_avg", 17, shape)
    assert read_fragment_name("blocks.0.weight@3:4") is None  # weights are never in parts


def test_shares_are_about_equal_and_leave_nothing_out():
    tensors = {f"{index}": torch.empty(size) for index, size in enumerate([100, 7, 60, 33, 1, 99, 0])}
    shares = divide(tensors, 3)
    assert sorted(name for names in shares.values() for name in names) == sorted(tensors)
    sizes = [sum(tensors[name].numel() for name in names) for names in shares.values()]
    assert sizes == [100, 100, 100]


def gather(rank: int) -> list[str] | None:
    return gather_objects("x" * rank, dist.group.WORLD)


@pytest.mark.parametrize("num_ranks", [2, 5, 8])
def test_the_tree_brings_every_ranks_part_to_the_first(num_ranks: int):
    first, *others = run_local_ranks(gather, num_ranks)
    assert first == ["x" * rank for rank in range(num_ranks)]
    assert others == [None] * (num_ranks - 1)
