"""Models of transformers in a configuration: parsed, refused before any work, and trained as a user runs them."""

import pytest
import torch

from mpc_dist.cli import main
from mpc_dist.data.dataset import select_tests
from mpc_dist.models import HuggingFace
from mpc_dist.models.hugging_face import LoraConfig
from mpc_dist.models.hugging_face.lora import AdaptedModel
from mpc_dist.readout import cross_entropy
from mpc_dist.runtime.mesh import Launch
from mpc_dist.training.config import Config, ConfigParser
from mpc_dist.training.job import train
from mpc_dist.training.metrics import read_metrics
from mpc_dist.training.planning import fingerprint
from tests.conftest import ROOT
from tests.models.hugging_face import save_whole
from tests.training.test_config import parse, write
from tests.training.test_loop import launch, losses

AutoModelForCausalLM = pytest.importorskip("transformers").AutoModelForCausalLM
PeftModel = pytest.importorskip("peft").PeftModel


def test_a_section_says_where_the_model_is_and_what_is_changed(tmp_path):
    save_whole("gpt2", tmp_path / "model")
    text = f"model: {{name: hf, path: {tmp_path / 'model'}, weights: random, overrides: {{n_layer: 2}}}}\n"
    path = write(tmp_path, text + "lora: {r: 2, alpha: 4, targets: [c_attn, mlp.c_fc]}")
    config = parse("--config", path)
    assert config.model == HuggingFace(path=str(tmp_path / "model"), weights="random", overrides={"n_layer": 2})
    assert config.lora == LoraConfig(r=2, alpha=4, targets=("c_attn", "mlp.c_fc"))
    assert isinstance(config.trained_model, AdaptedModel)
    assert config.partition == (2,)
    changed = parse("--config", path, "--model.overrides", "{n_layer: 5}", "--lora.targets", "[c_proj]")
    assert (changed.model.num_blocks, changed.lora.targets) == (5, ("c_proj",))
    again = parse("--config", write(tmp_path, config.as_yaml()))
    assert again == config
    assert fingerprint(changed) != fingerprint(config)  # a plan for one is none for the other


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {name: hf}", r"needs model\.path .* or model\.architecture"),
        ("model: {name: hf, path: nowhere/at/all}", "nowhere/at/all is neither a folder nor a hub id"),
        ("model: {name: hf, architecture: gpt2, overrides: {n_layers: 3}}", r"did you mean 'n_layer'"),
        (
            "model: {name: hf, architecture: gpt2}\nlora: {r: 2, targets: [q_proj]}",
            r"lora\.targets has 'q_proj', which matches no module of any block; there are attn\.c_attn",
        ),
        ("model: {name: gpt}\nlora: {r: 2, targets: [qkv]}", "lora adapts model 'hf', not GPT"),
        ("lora: {r: 2, target: [qkv]}", r"unknown key 'lora\.target'; did you mean 'targets'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_any_work(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse("--config", write(tmp_path, text))
    assert "\n" not in str(caught.value)


def build(name: str, *arguments: str) -> Config:
    config = ["--config", str(ROOT / "configs" / f"{name}.yaml")]
    return ConfigParser([*config, *arguments], prog="test", description="").parse()[0]


@pytest.mark.parametrize(("name", "steps"), [("hf_gpt2_small", 12), ("hf_vit_small", 100), ("hf_lora_small", 12)])
def test_the_small_configs_learn(name, steps, tmp_path):
    few = f"--parallel.stages 1 --training.steps {steps} --training.log_every 1 --training.eval_batches 1".split()
    config = build(name, *few, "--training.folder", str(tmp_path))
    train(config, Launch(), is_quiet=True)
    last = str(config.model.num_blocks)
    found = [line["losses"][last] for line in read_metrics(tmp_path, 0) if line["event"] == "step"]
    assert len(found) == steps
    assert found[-1] < found[0] - 0.1


def test_adapters_train_alike_on_two_ranks_and_in_one_process(tmp_path):
    """Every rank builds its own blocks and adapters; dropout of transformers and of peft included."""
    small = (
        f"--config {ROOT}/configs/hf_lora_small.yaml --lora.dropout 0.1 --training.steps 3 --training.log_every 1 "
        "--training.eval_batches 1 --horizon.windows sliding --horizon.size 2 --horizon.unit blocks "
        "--training.precision float64"
    ).split()
    launch(2, *small, "--training.folder", str(tmp_path / "two"))
    train(parse(*small, "--training.folder", str(tmp_path / "one"), "--parallel.stages", "1"), Launch(), is_quiet=True)
    one, two = losses(tmp_path / "one", 1), losses(tmp_path / "two", 2)
    assert len(one) == 3 * 3  # three steps, readouts at boundaries 2, 3 and 4
    assert set(one) == set(two)
    for key, loss in one.items():
        assert two[key] == pytest.approx(loss, rel=1e-9), key


@pytest.mark.parametrize("name", ["hf_gpt2_small", "hf_lora_small"])
def test_an_exported_run_is_loaded_by_transformers_and_peft(name, tmp_path):
    few = "--parallel.stages 1 --training.steps 3 --training.log_every 1 --training.eval_batches 1".split()
    config = build(name, *few, "--training.folder", str(tmp_path / "run"))
    scores = train(config, Launch(), is_quiet=True)
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    if config.lora.r:
        model = PeftModel.from_pretrained(model, tmp_path / "out" / "adapters")
    assert (tmp_path / "out" / "adapters").exists() == bool(config.lora.r)
    test = config.data.load().test
    (tested,) = select_tests(test, num_samples=config.batch_size, seed=config.seed, batch_size=config.batch_size)
    inputs, labels = test.read(tested)
    with torch.no_grad():
        loss = cross_entropy(model(inputs).logits, labels)
    assert float(loss) == pytest.approx(scores[4].loss, rel=1e-5)  # float32
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 2  # would overwrite
