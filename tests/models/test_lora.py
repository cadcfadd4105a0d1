"""Adapters: only they train, peft reads them, and what is frozen costs no weight work."""

import dataclasses
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mpc_dist.gradient import eager_mpc_gradients, mpc_gradients
from mpc_dist.models import GPT, HuggingFace, build_chain, build_parts
from mpc_dist.models.hugging_face import LoraConfig, adapt, write_adapters, write_pretrained
from mpc_dist.profile import measure_angles
from mpc_dist.profile.blocks import measure_blocks
from mpc_dist.readout import cross_entropy
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.runtime.segment import Segment
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.schedule import build_schedule, lay_out
from mpc_dist.windows import Windows, backprop, sliding
from tests.examples import assert_same
from tests.models.hugging_face import EXAMPLES, GPT2, TOKENS, draw_for_whole, save_whole
from tests.runtime.reference import KeepGradients

pytest.importorskip("peft")
FLOAT32 = 1e-5  # other orders of the same sums
TARGETS = {
    "gpt2": ("attn.c_attn", "c_proj"),
    "llama": ("q_proj", "v_proj", "down_proj"),
    "vit": ("q_proj", "fc1"),
    "resnet, bottleneck": ("convolution",),
}


def lora_for(name: str, **fields) -> LoraConfig:
    return LoraConfig(r=2, alpha=6, targets=TARGETS[name], **fields)


def build_random(name: str) -> HuggingFace:
    architecture, fields, _ = EXAMPLES[name]
    return HuggingFace(architecture=architecture, overrides=fields)


def train_a_little(chain) -> None:
    """Move adapters and fresh heads: peft's begin with B = 0, which would hide much."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        for parameter in chain.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn_like(parameter)


@pytest.mark.parametrize("weights", ["pretrained", "fresh_head"])
@pytest.mark.parametrize("name", TARGETS)
def test_peft_loads_the_adapters_with_equal_logits_and_at_full_horizon_equal_gradients(name, weights, tmp_path):
    import transformers
    from peft import PeftModel

    _, model, task = save_whole(name, tmp_path / "base")
    model, lora = dataclasses.replace(model, weights=weights), lora_for(name)
    chain = build_chain(adapt(model, lora), task, boundaries=[])
    train_a_little(chain)
    write_adapters(model, lora, chain.state_dict(), tmp_path / "adapters")

    base = getattr(transformers, model.table.auto_class).from_pretrained(tmp_path / "base")
    tuned = PeftModel.from_pretrained(base, tmp_path / "adapters", is_trainable=True).train()
    inputs, labels, batch = draw_for_whole(task)
    tuned(**batch).loss.backward()
    expected = {
        key.removeprefix("base_model.model.").replace("modules_to_save.default.", ""): parameter.grad
        for key, parameter in tuned.named_parameters()
        if parameter.requires_grad
    }
    found = mpc_gradients(chain, inputs, labels, backprop(chain.num_blocks))
    assert_same({model.hub_name(key): value for key, value in found.items()}, expected, tolerance=FLOAT32)
    with torch.no_grad():
        images_or_tokens = inputs
        torch.testing.assert_close(
            chain.eval()(images_or_tokens), tuned.eval()(images_or_tokens).logits, atol=FLOAT32, rtol=FLOAT32
        )
    settings = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", 2, 6)
    assert settings["base_model_name_or_path"] == str(tmp_path / "base")


def test_a_random_base_is_written_without_its_adapters_and_both_load(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model, lora = build_random("gpt2"), lora_for("gpt2")
    chain = build_chain(adapt(model, lora), TOKENS, readout="local")
    train_a_little(chain)
    write_pretrained(model, chain.state_dict(), tmp_path / "base")
    write_adapters(model, lora, chain.state_dict(), tmp_path / "adapters")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tuned = PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    inputs, _, _ = draw_for_whole(TOKENS)
    with torch.no_grad():
        torch.testing.assert_close(chain.eval()(inputs), tuned(inputs).logits, atol=FLOAT32, rtol=FLOAT32)
    with pytest.raises(ValueError, match=r"already holds adapter_model\.safetensors, which would be lost"):
        write_adapters(model, lora, chain.state_dict(), tmp_path / "adapters")
    with pytest.raises(ValueError, match="the state holds no adapters; train with a lora section"):
        write_adapters(model, lora, build_chain(model, TOKENS).state_dict(), tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", TARGETS)
def test_only_adapters_and_fresh_heads_train(name, tmp_path):
    _, model, task = save_whole(name, tmp_path)
    chain = build_chain(adapt(model, lora_for(name)), task, readout="local")
    before = {key: value.clone() for key, value in chain.state_dict().items()}
    windows = sliding(3, 1)
    layout = lay_out(windows, (1, 1, 1))
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    pipeline = InProcessPipeline(chain, layout, build_schedule(layout, 2), optimizer=sgd)
    held = {id(p) for stage in pipeline.stages for g in stage.optimizer.param_groups for p in g["params"]}
    trained = {key for key, parameter in chain.named_parameters() if id(parameter) in held}
    assert all(".lora_" in key or key.startswith(("readouts.1.", "readouts.2.")) for key in trained)
    assert {key for key, parameter in chain.named_parameters() if parameter.requires_grad} == trained
    inputs, labels, _ = draw_for_whole(task)
    for _ in range(2):  # B is 0 at first, and so is the gradient of A
        pipeline.step(inputs, labels)
    weights = dict(chain.named_parameters())
    moved = {key for key in weights if not torch.equal(weights[key], before[key])}
    # A ReLU may be dead in so narrow a net; what is frozen may not move at all.
    assert moved <= trained
    assert len(moved) > 0.8 * len(trained)
    assert all(parameter.grad is None for parameter in chain.parameters() if not parameter.requires_grad)


def count_products(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    counts = counter.get_flop_counts()["Global"]
    return sum(count for op, count in counts.items() if "attention" not in str(op))


def test_relays_and_frozen_weights_cost_no_weight_work():
    """Per product of a state with a weight: a forward, an input gradient and a weight gradient cost the same."""
    overrides = {**GPT2, "n_embd": 64, "vocab_size": 11}
    model = HuggingFace(architecture="gpt2", overrides=overrides)
    lora = LoraConfig(r=1, alpha=1, targets=("attn.c_attn",))

    def costs(given) -> tuple[int, int, int]:
        block = build_parts(given, TOKENS).block(1)
        segment = Segment([block], 1, None, cross_entropy, num_uses=2)
        state = torch.randn(4, 7, 64)
        forward = count_products(lambda: segment.forward(0, state))
        relay = count_products(lambda: segment.relay(0, torch.ones_like(state)))
        backward = count_products(lambda: segment.backward(0, torch.ones_like(state), to_input=True))
        assert all(parameter.grad is None for parameter in block.parameters() if not parameter.requires_grad)
        return forward, relay, backward

    forward, relay, backward = costs(model)
    assert (relay, backward) == (forward, 2 * forward)
    adapted_forward, adapted_relay, adapted_backward = costs(adapt(model, lora))
    adapters = adapted_forward - forward
    assert 0 < adapters < 0.02 * forward
    assert adapted_relay == adapted_forward  # neither the weights' nor the adapters'
    assert adapted_backward == adapted_relay + adapters  # the adapters' alone


def test_adapters_depend_on_seed_and_block_alone():
    adapted = adapt(build_random("llama"), lora_for("llama"))
    chain, other = (build_chain(adapted, TOKENS, seed=seed).state_dict() for seed in (0, 1))
    alone = build_parts(adapted, TOKENS, seed=0).block(2).state_dict()
    key = "layer.self_attn.q_proj.lora_A.default.weight"
    assert torch.equal(alone[key], chain[f"blocks.2.{key}"])
    assert not torch.equal(alone[key], other[f"blocks.2.{key}"])
    assert not torch.equal(chain[f"blocks.1.{key}"], chain[f"blocks.2.{key}"])
    # The base is what it is without adapters.
    plain = build_chain(build_random("llama"), TOKENS, seed=0).state_dict()
    assert torch.equal(
        chain["blocks.2.layer.self_attn.q_proj.base_layer.weight"], plain["blocks.2.layer.self_attn.q_proj.weight"]
    )


MAPS = [sliding(3, 1), sliding(3, 2), backprop(3)]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("windows", MAPS, ids=["h = 1", "h = 2", "back-propagation"])
@pytest.mark.parametrize("targets", [("c_attn",), ("h.0.attn.c_attn",), ("h.2.attn.c_attn",)])
def test_stages_without_a_trained_weight_pass_on_what_others_need(targets, windows: Windows, split, tmp_path):
    _, model, task = save_whole("gpt2", tmp_path)
    adapted = adapt(model, LoraConfig(r=2, targets=targets))
    chain = build_chain(adapted, task, readout="shared")
    train_a_little(chain)
    inputs, labels, _ = draw_for_whole(task)
    expected = mpc_gradients(chain, inputs, labels, windows)
    assert_same(eager_mpc_gradients(chain, inputs, labels, windows), expected, tolerance=FLOAT32)
    layout = lay_out(windows, (1, 1, 1))
    options = StageOptions(clip_norm=1e9, clip_scope="global")
    pipeline = InProcessPipeline(
        chain, layout, build_schedule(layout, 1, split=split), optimizer=KeepGradients, options=options
    )
    pipeline.step(inputs, labels)
    found = {key: parameter.grad for key, parameter in chain.named_parameters() if parameter.grad is not None}
    assert_same(found, expected, tolerance=FLOAT32)
    assert pipeline.evaluate(inputs, labels)[3].loss > 0


def test_a_frozen_stage_takes_part_in_a_norm_over_all_stages():
    model = adapt(build_random("gpt2"), LoraConfig(r=2, targets=("h.0.attn.c_attn",)))
    chain, sums = build_chain(model, TOKENS, boundaries=[]), []
    layout = lay_out(backprop(3), (1, 1, 1))
    pipeline = InProcessPipeline(
        chain,
        layout,
        build_schedule(layout, 1),
        optimizer=KeepGradients,
        options=StageOptions(clip_norm=1e9, clip_scope="global"),
    )
    for stage in pipeline.stages:
        stage._sum_over_stages = lambda value: sums.append(float(value)) or torch.ones(())
    inputs, labels, _ = draw_for_whole(TOKENS)
    pipeline.step(inputs, labels)
    assert len(sums) == 3
    assert sums.count(0.0) == 1  # block 1 is frozen; block 2's stage has the fresh head


def test_costs_and_angles_of_a_model_with_adapters_are_measured():
    chain = build_chain(adapt(build_random("gpt2"), lora_for("gpt2")), TOKENS)
    train_a_little(chain)
    inputs, labels, _ = draw_for_whole(TOKENS)
    costs = measure_blocks(chain, inputs, labels, torch.optim.AdamW, repeats=1)
    for block, measured in zip(chain.blocks, costs.blocks, strict=True):
        trained = sum(p.nbytes for p in block.parameters() if p.requires_grad)
        assert measured.parameter_bytes == trained
        assert measured.fixed_bytes == sum(p.nbytes for p in block.parameters()) - trained
    assert measure_angles(chain, [(inputs, labels)]).horizon_cosines()[-1] == pytest.approx(1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": -1}, r"lora\.r -1 is out of range"),
        ({"r": 4}, r"lora\.targets is empty; list modules to adapt"),
        ({"targets": ("c_attn",)}, r"lora\.targets \['c_attn'\] need a rank; set lora\.r to 1 or more"),
        ({"r": 4, "targets": ("c_attn",), "dropout": 1.0}, r"lora\.dropout 1\.0 is out of range"),
        ({"r": 4, "targets": ("c_attn",), "alpha": 0}, r"lora\.alpha 0 is out of range"),
    ],
)
def test_wrong_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        LoraConfig(**fields)


@pytest.mark.parametrize("target", ["q_proj", "lm_head", "layer", "ttn.c_attn", "attn"])
def test_a_target_that_matches_nothing_is_named_with_those_that_exist(target):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        adapt(build_random("gpt2"), LoraConfig(r=2, targets=("c_attn", target)))
    assert str(caught.value) == (
        f"lora.targets has {target!r}, which matches no module of any block; there are attn.c_attn, attn.c_proj, "
        "mlp.c_fc, mlp.c_proj, transformer.wpe, transformer.wte"
    )


def test_other_families_are_refused_and_rank_0_is_no_adapter():
    with pytest.raises(ValueError, match="lora adapts model 'hf', not GPT; leave lora out, or use model 'hf'"):
        adapt(GPT(), LoraConfig(r=2, targets=("qkv",)))
    assert adapt(GPT(), LoraConfig()) == GPT()
