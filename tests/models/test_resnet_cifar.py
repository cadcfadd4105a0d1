"""The residual networks for small images, and the trained ResNet-56."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mpc_dist.data import Batches, Cifar10Data
from mpc_dist.models import ResNetCifar, build_chain
from mpc_dist.task import Task
from tests.examples import IMAGES, TOKENS

CIFAR10 = Task("classification", (3, 32, 32), 10)
CIFAR100 = Task("classification", (3, 32, 32), 100)


def test_groups_halve_the_image_and_double_the_channels():
    chain = build_chain(ResNetCifar(blocks_per_group=2), CIFAR10, readout="pool")
    state, shapes = torch.randn(2, 3, 32, 32), []
    for block in chain.blocks:
        state = block(state)
        shapes.append(tuple(state.shape[1:]))
    assert shapes == [(16, 32, 32)] * 2 + [(32, 16, 16)] * 2 + [(64, 8, 8)] * 2


@pytest.mark.parametrize(("n", "layers"), [(9, 56), (10, 62)])
def test_n_gives_6n_plus_2_layers(n, layers):
    chain = build_chain(ResNetCifar(blocks_per_group=n), CIFAR10, readout="pool")
    weights = [m for m in chain.modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))]
    assert len(weights) == layers
    assert chain.num_blocks == 3 * n


def test_the_trained_resnet56_classifies_the_cifar10_test_subset(real_data: Path, cifar: Path):
    model = ResNetCifar(blocks_per_group=9, checkpoint=str(real_data / "checkpoints" / "resnet56-4bfd9763.th"))
    test = Cifar10Data(folder=str(cifar / "cifar-10-batches-py"), num_train_files=1).load().test
    chain = build_chain(model, CIFAR10, readout="pool").eval()
    batches = Batches(test, batch_size=500, seed=0, shuffle=False)
    correct = 0
    with torch.no_grad():
        for _ in range(batches.batches_per_epoch):
            images, labels = next(batches)
            correct += int((chain(images).argmax(-1) == labels).sum())
    # 93.39 % on the full 10,000; one standard error on these 2,000 is 0.56 %, so three of them.
    assert correct / test.num_samples == pytest.approx(0.934, abs=0.017)


def test_a_checkpoint_of_another_depth_or_width_is_refused_with_the_remedy(real_data: Path):
    path = str(real_data / "checkpoints" / "resnet56-4bfd9763.th")
    with pytest.raises(ValueError, match=r"has 9 residual blocks per group, the model 10; set .* to 9"):
        build_chain(ResNetCifar(blocks_per_group=10, checkpoint=path), CIFAR10)
    with pytest.raises(ValueError, match=r"blocks\.0\.0\.conv1\.weight is \(16, 3, 3, 3\) there, \(8, 3, 3, 3\) in"):
        build_chain(ResNetCifar(blocks_per_group=9, channels=8, checkpoint=path), CIFAR10)
    with pytest.raises(ValueError, match=r"readouts\.27\.linear\.weight is \(10, 64\) there, \(100, 64\) .*fresh_head"):
        build_chain(ResNetCifar(blocks_per_group=9, checkpoint=path), CIFAR100)


def test_a_checkpoint_of_other_classes_gives_its_blocks_when_the_head_is_to_be_fresh(real_data: Path):
    trained = ResNetCifar(blocks_per_group=9, checkpoint=str(real_data / "checkpoints" / "resnet56-4bfd9763.th"))
    whole = build_chain(trained, CIFAR10, readout="pool")
    tuned = build_chain(replace(trained, weights="fresh_head"), CIFAR100, readout="pool", seed=3)
    drawn = build_chain(ResNetCifar(blocks_per_group=9), CIFAR100, readout="pool", seed=3)
    blocks = tuned.blocks.state_dict()
    for name, value in whole.blocks.state_dict().items():
        assert torch.equal(blocks[name], value), name
    for name, value in drawn.readouts["27"].state_dict().items():
        assert torch.equal(tuned.readouts["27"].state_dict()[name], value), name


def test_a_fresh_head_without_a_checkpoint_is_refused():
    with pytest.raises(ValueError, match=r"model\.weights 'fresh_head' .* model\.checkpoint, but there is none; give"):
        ResNetCifar(weights="fresh_head")


def test_files_that_are_no_checkpoint_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"does not exist; give the path of a \.th file"):
        build_chain(ResNetCifar(checkpoint=str(tmp_path / "none.th")), CIFAR10)
    (tmp_path / "text.th").write_text("hello")
    with pytest.raises(ValueError, match=r"cannot be read.*give one saved by torch\.save$"):
        build_chain(ResNetCifar(checkpoint=str(tmp_path / "text.th")), CIFAR10)
    torch.save({"weights": {}}, tmp_path / "other.th")
    with pytest.raises(ValueError, match="holds no 'state_dict'"):
        build_chain(ResNetCifar(checkpoint=str(tmp_path / "other.th")), CIFAR10)
    torch.save({"state_dict": {"module.conv1.weight": 3}}, tmp_path / "numbers.th")
    with pytest.raises(ValueError, match="holds no 'state_dict' of tensors"):
        build_chain(ResNetCifar(checkpoint=str(tmp_path / "numbers.th")), CIFAR10)
    for key in ("layer1.foo.x", "layer2.0.shortcut.0.weight", "fc.weight"):
        torch.save({"state_dict": {key: torch.zeros(1)}}, tmp_path / "keys.th")
        with pytest.raises(ValueError, match=f"holds '{key}', which this network lacks"):
            build_chain(ResNetCifar(checkpoint=str(tmp_path / "keys.th")), CIFAR10)


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_must_be_even(channels):
    with pytest.raises(ValueError, match=rf"model\.channels {channels} "):
        ResNetCifar(channels=channels)


def test_tokens_are_refused():
    with pytest.raises(ValueError, match=r"classifies images .*, but the data is tokens"):
        build_chain(ResNetCifar(), TOKENS)
    assert build_chain(ResNetCifar(blocks_per_group=1, channels=2), IMAGES).num_blocks == 3
