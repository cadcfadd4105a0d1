"""Models of transformers as chains: the same numbers, read part by part, and written back."""

import json
import logging
from pathlib import Path

import pytest
import torch

from mpc_dist.gradient import mpc_gradients
from mpc_dist.models import HuggingFace, build_chain, build_parts
from mpc_dist.models.hugging_face import write_pretrained
from mpc_dist.models.hugging_face.checkpoint import WeightFiles
from mpc_dist.profile import measure_angles, measure_memory
from mpc_dist.profile.blocks import measure_blocks, without_allocating
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.schedule import build_schedule, lay_out, split_evenly
from mpc_dist.task import Task
from mpc_dist.windows import backprop, sliding
from tests.examples import assert_same, draw_batch
from tests.models.hugging_face import (
    EXAMPLES,
    GPT2,
    IMAGES,
    LLAMA,
    RESNET,
    TOKENS,
    VIT,
    build_whole,
    draw_for_whole,
    save_whole,
)

pytest.importorskip("transformers")
FLOAT32 = 1e-5  # the bound for float32: other orders of the same sums


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def hub_gradients(model, chain, inputs, labels, windows):
    gradients = mpc_gradients(chain, inputs, labels, windows)
    return {model.hub_name(name): value for name, value in gradients.items()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_at_full_horizon_loss_and_every_gradient_are_those_of_transformers(name, tmp_path):
    whole, model, task = save_whole(name, tmp_path)
    chain = build_chain(model, task, boundaries=[])
    inputs, labels, batch = draw_for_whole(task)
    found = hub_gradients(model, chain, inputs, labels, backprop(chain.num_blocks))

    loss = whole(**batch).loss
    loss.backward()
    expected = {key: parameter.grad for key, parameter in whole.named_parameters()}
    if "tied" in name:
        head, embedding = model.table.tied
        # The policy: two copies, whose gradients add up to the tied one's.
        found[embedding] = found[embedding] + found.pop(head)
    assert_same(found, expected, tolerance=FLOAT32)

    # The statistics of batch norm have moved, in both alike.
    assert dict(whole.named_buffers()).keys() >= {model.hub_name(key) for key, _ in stored_buffers(chain)}
    for key, buffer in stored_buffers(chain):
        torch.testing.assert_close(buffer, whole.get_buffer(model.hub_name(key)), atol=FLOAT32, rtol=FLOAT32)
    state = inputs
    for block in chain.blocks:
        state = block(state)
    torch.testing.assert_close(chain.loss_at(chain.num_blocks, state, labels), loss.detach(), atol=FLOAT32, rtol=0)


def stored_buffers(chain):
    return [(key, buffer) for key, buffer in chain.named_buffers() if key in chain.state_dict()]


def test_tied_embeddings_become_two_copies_and_that_is_said(tmp_path, caplog):
    _, model, task = save_whole("gpt2, tied", tmp_path)
    with caplog.at_level(logging.WARNING, logger="mpc_dist"):
        chain = build_chain(model, task, boundaries=[])
    assert "tied embeddings are untied" in caplog.text
    head, embedding = chain.readouts["3"].linear.weight, chain.blocks[0].stem.wte.weight
    assert torch.equal(head, embedding)
    assert head.data_ptr() != embedding.data_ptr()


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_written_back_is_loaded_by_transformers_with_equal_weights_and_logits(name, tmp_path):
    import transformers

    _, model, task = save_whole(name, tmp_path / "before")
    chain = build_chain(model, task, readout="local")
    inputs, labels, _ = draw_for_whole(task)
    gradients = mpc_gradients(chain, inputs, labels, sliding(chain.num_blocks, 1))
    with torch.no_grad():
        for key, parameter in chain.named_parameters():
            parameter -= 0.1 * gradients[key]
    write_pretrained(model, chain.state_dict(), tmp_path / "after")

    loader = getattr(transformers, model.table.auto_class)
    again, report = loader.from_pretrained(tmp_path / "after", output_loading_info=True)
    assert not any(report.values()), report
    state = again.state_dict()
    own = {
        model.hub_name(key): value
        for key, value in chain.state_dict().items()
        if key.startswith(("blocks.", f"readouts.{chain.num_blocks}."))
    }
    assert state.keys() == own.keys()
    for key, value in own.items():
        assert torch.equal(state[key], value), key
    with torch.no_grad():
        logits = again.eval()(inputs).logits
        torch.testing.assert_close(chain.eval()(inputs), logits, atol=FLOAT32, rtol=FLOAT32)
    if "tied" in name:
        assert json.loads((tmp_path / "after" / "config.json").read_text())["tie_word_embeddings"] is False
    # And it is read here again, as what it is.
    reread = build_chain(HuggingFace(path=str(tmp_path / "after")), task, boundaries=[]).state_dict()
    for key, value in reread.items():
        assert torch.equal(value, chain.state_dict()[key]), key


def test_writing_neither_overwrites_nor_leaves_out(tmp_path):
    _, model, task = save_whole("llama", tmp_path)
    state = build_chain(model, task, boundaries=[]).state_dict()
    with pytest.raises(ValueError, match=r"already holds model\.safetensors, which would be lost; give another folder"):
        write_pretrained(model, state, tmp_path)
    del state["blocks.1.layer.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing, expected \(24, 16\)"):
        write_pretrained(model, state, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; give a folder"):
        write_pretrained(model, state, tmp_path / "file")


def test_a_block_reads_its_own_tensors_and_needs_no_other_file(tmp_path):
    whole, model, task = save_whole("llama", tmp_path, max_shard_size="8KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    own = {file for key, file in index.items() if key.startswith("model.layers.1.")}
    others = set(index.values()) - own
    assert others
    for file in others:
        (tmp_path / file).unlink()
    block = build_parts(model, task).block(1)
    for key, value in block.state_dict().items():
        assert torch.equal(value, whole.state_dict()[model.hub_name(f"blocks.1.{key}")])
    with pytest.raises(ValueError, match=r"has no model-0000\d-of-\d+\.safetensors; it has .*give a folder"):
        build_chain(model, task)


def test_interior_readouts_do_not_read_the_head(tmp_path, monkeypatch):
    _, model, task = save_whole("gpt2", tmp_path)
    parts, read = build_parts(model, task, readout="local"), []
    monkeypatch.setattr(WeightFiles, "read", lambda self, names: read.extend(names) or {})
    parts.readout(1)
    assert read == []


def test_older_names_and_files_of_a_bare_base_model_are_read(tmp_path):
    from safetensors.torch import load_file, save_file

    whole, model, task = save_whole("vit", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "vit.encoder.layer.0.attention.attention.query.weight" in tensors
    assert torch.equal(
        build_parts(model, task).block(0).layer.attention.q_proj.weight, whole.vit.layers[0].attention.q_proj.weight
    )
    bare = {key.removeprefix("vit."): value for key, value in tensors.items() if not key.startswith("classifier")}
    save_file({**bare, "pooler.dense.weight": torch.zeros(8, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"has no classifier, but the data 5 classes; set model\.weights to fresh_head"
    ):
        build_chain(HuggingFace(path=str(tmp_path)), task)
    chain = build_chain(HuggingFace(path=str(tmp_path), weights="fresh_head"), task)
    assert torch.equal(chain.blocks[2].layer.mlp.fc1.weight, whole.vit.layers[2].mlp.fc1.weight)
    assert torch.equal(chain.readouts["3"].norm.weight, whole.vit.layernorm.weight)
    assert not torch.equal(chain.readouts["3"].linear.weight, whole.classifier.weight)


def test_half_precision_files_are_read_in_the_default_precision(tmp_path):
    build_whole("gpt2").bfloat16().save_pretrained(tmp_path)
    chain = build_chain(HuggingFace(path=str(tmp_path)), TOKENS)
    assert {parameter.dtype for parameter in chain.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "resnet, basic"])
def test_random_weights_are_drawn_as_transformers_does_and_depend_on_seed_and_part_alone(name):
    architecture, fields, task = EXAMPLES[name]
    sizes = {"gpt2": {"n_embd": 64}, "llama": {"hidden_size": 64}, "vit": {"hidden_size": 64}}.get(architecture, {})
    model = HuggingFace(architecture=architecture, overrides={**fields, **sizes})
    first, again, other = (build_chain(model, task, seed=seed).state_dict() for seed in (0, 0, 1))
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification

    kind = AutoModelForCausalLM if task.kind == "tokens" else AutoModelForImageClassification
    expected = kind.from_config(AutoConfig.for_model(architecture, **{**fields, **sizes})).state_dict()
    for key, value in first.items():
        assert torch.equal(value, again[key]), key
        likeness = expected.get(model.hub_name(key)) if key.startswith(("blocks.", "readouts.3.")) else None
        if likeness is None or value.numel() < 500:
            continue
        assert not torch.equal(value, other[key]), key
        # Six standard errors of a standard deviation estimated from that many numbers, on both sides.
        assert float(value.std() / likeness.std()) == pytest.approx(1, abs=6 / value.numel() ** 0.5), key
    alone = build_parts(model, task, seed=0).block(1).state_dict()
    assert all(torch.equal(value, first[f"blocks.1.{key}"]) for key, value in alone.items())


def test_a_configuration_alone_gives_random_weights_if_asked_for(tmp_path):
    build_whole("gpt2").config.save_pretrained(tmp_path)
    chain = build_chain(HuggingFace(path=str(tmp_path), weights="random", overrides={"n_layer": 2}), TOKENS)
    assert chain.num_blocks == 2
    with pytest.raises(ValueError, match=r"has no model\.safetensors; it has config\.json: give a folder of save_pret"):
        build_chain(HuggingFace(path=str(tmp_path)), TOKENS)


@pytest.mark.parametrize("name", ["resnet, basic", "resnet, bottleneck", "vit", "llama"])
def test_widths_are_those_of_the_states(name):
    architecture, fields, task = EXAMPLES[name]
    model = HuggingFace(architecture=architecture, overrides=fields)
    chain = build_chain(model, task, readout="local")
    state, *_ = draw_for_whole(task)
    for boundary, block in enumerate(chain.blocks, start=1):
        state = block(state)
        assert state.shape[1 if architecture == "resnet" else -1] == model.width_at(boundary, task)
        assert chain.predict(boundary, state).shape[-1] == task.num_outputs


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "resnet, bottleneck"])
@pytest.mark.parametrize("split", [False, True])
def test_a_pipeline_of_stages_gives_the_same_gradients(name, split):
    architecture, fields, task = EXAMPLES[name]
    model = HuggingFace(architecture=architecture, overrides=fields)
    inputs, labels, _ = draw_for_whole(task)
    windows = sliding(3, 2)
    expected = mpc_gradients(build_chain(model, task), inputs, labels, windows)
    chain, layout = build_chain(model, task), lay_out(windows, (1, 1, 1))
    before = {key: value.detach().clone() for key, value in chain.named_parameters()}
    schedule = build_schedule(layout, 1, split=split)
    pipeline = InProcessPipeline(chain, layout, schedule, optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    pipeline.step(inputs, labels)
    found = {key: before[key] - value.detach() for key, value in chain.named_parameters() if key in expected}
    assert_same(found, expected, tolerance=FLOAT32)


@pytest.mark.parametrize(
    ("architecture", "fields", "task"),
    [
        ("llama", {**LLAMA, "attention_dropout": 0.3}, TOKENS),
        ("vit", {**VIT, "attention_probs_dropout_prob": 0.3}, IMAGES),
        ("gpt2", {**GPT2, "attn_pdrop": 0.3}, TOKENS),
    ],
)
def test_dropout_inside_attention_is_the_same_for_any_partition_and_state_of_the_generator(architecture, fields, task):
    found = []
    for num_stages in (1, 3):
        chain = build_chain(HuggingFace(architecture=architecture, overrides=fields), task).train()
        layout = lay_out(backprop(chain.num_blocks), split_evenly(chain.num_blocks, num_stages))
        pipeline = InProcessPipeline(
            chain, layout, build_schedule(layout, 2), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
        )
        torch.manual_seed(num_stages)
        records = [pipeline.step(*draw_batch(task))[-1] for _ in range(2)]
        found.append([float(loss) for record in records for loss in record.losses[layout.num_segments]])
    assert found[0] == pytest.approx(found[1], abs=FLOAT32)
    assert found[0][0] != found[0][1]  # micro-batches drop different features


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "resnet, basic"])
def test_angles_memory_and_costs_are_measured(name):
    architecture, fields, task = EXAMPLES[name]
    chain = build_chain(HuggingFace(architecture=architecture, overrides=fields), task)
    inputs, labels, _ = draw_for_whole(task)
    assert measure_angles(chain, [(inputs, labels)]).horizon_cosines()[-1] == pytest.approx(1)
    held = measure_memory(chain, inputs, labels, horizons=[1, 3])
    assert 0 < held[1] < held[3]


def test_a_model_is_planned_without_allocating_or_reading_it(tmp_path):
    _, model, task = save_whole("llama", tmp_path)
    with without_allocating():
        model.check_task(task)
        chain = build_chain(model, task)
        inputs, labels = torch.zeros(2, 7, dtype=torch.int64), torch.zeros(2, 7, dtype=torch.int64)
        costs = measure_blocks(chain, inputs, labels, torch.optim.AdamW, flops_per_second=1e12)
    assert all(block.forward > 0 for block in costs.blocks)


WRONG_TASKS = [
    ("gpt2", GPT2, IMAGES, "gpt2 is for tokens, but the data is classification; use data 'text'"),
    ("vit", VIT, TOKENS, "vit is for classification, but the data is tokens; use data 'image_folder'"),
    ("gpt2", GPT2, Task("tokens", (9,), 11), r"data\.context 9 exceeds the model's max_position_embeddings 8"),
    ("llama", LLAMA, Task("tokens", (7,), 12), "vocabulary of 12 exceeds the model's vocab_size 11"),
    ("vit", VIT, Task("classification", (3, 8, 8), 6), "the data has 6 classes, the model's num_labels is 5"),
    ("vit", VIT, Task("classification", (1, 8, 8), 5), "the data has 1 channels, the model's num_channels is 3"),
    ("vit", VIT, Task("classification", (3, 9, 9), 5), "the data has 9 pixels a side, the model's image_size is 8"),
    ("resnet", RESNET, Task("classification", (64,), 5), r"takes images .*, but the data has \(64,\)"),
]


@pytest.mark.parametrize(("architecture", "fields", "task", "message"), WRONG_TASKS)
def test_data_that_does_not_fit_is_refused(architecture, fields, task, message):
    with pytest.raises(ValueError, match=message):
        build_chain(HuggingFace(architecture=architecture, overrides=fields), task)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"needs model\.path .* or model\.architecture; give one"),
        ({"architecture": "gpt3"}, r"unknown model\.architecture 'gpt3'; did you mean 'gpt2'"),
        ({"architecture": "gpt2", "weights": "pretrained"}, r"are read from a model\.path, but there is none"),
        (
            {"architecture": "gpt2", "overrides": {"n_layers": 2}},
            r"'model\.overrides\.n_layers'; did you mean 'n_layer'",
        ),
        ({"architecture": "gpt2", "overrides": {"n_layer": "two"}}, r"model\.overrides do not fit gpt2: .*n_layer"),
        ({"path": "no/such/folder/here"}, "no/such/folder/here is neither a folder nor a hub id"),
    ],
)
def test_a_wrong_description_of_the_model_is_refused(fields, message):
    with pytest.raises(ValueError, match=message) as caught:
        _ = HuggingFace(**fields).num_blocks
    assert "\n" not in str(caught.value)


def test_wrong_folders_are_refused(tmp_path):
    model = HuggingFace(path=str(tmp_path))
    with pytest.raises(ValueError, match=r"has no config\.json; it has no files: give a folder of save_pretrained"):
        _ = model.num_blocks
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(
        ValueError, match=r"is a 'bert', which cannot be cut into blocks; .*known: gpt2, llama, resnet, vit"
    ):
        _ = HuggingFace(path=str(tmp_path)).num_blocks
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is no configuration that transformers reads"):
        _ = HuggingFace(path=str(tmp_path)).num_blocks


def test_weights_that_do_not_fit_are_named(tmp_path):
    _, _, task = save_whole("gpt2", tmp_path)
    path = str(tmp_path)
    with pytest.raises(
        ValueError, match=r"transformer\.h\.0\.mlp\.c_fc\.weight is \(8, 32\) there, \(8, 16\) in the mo"
    ):
        build_chain(HuggingFace(path=path, overrides={"n_inner": 16}), task, boundaries=[])
    with pytest.raises(ValueError, match=r"transformer\.h\.3\.ln_1\.weight is missing there"):
        build_parts(HuggingFace(path=path, overrides={"n_layer": 4}), task).block(3)
    with pytest.raises(
        ValueError, match=r"holds transformer\.h\.2\..*, but the model has 2 layers; leave out model\.over"
    ):
        build_chain(HuggingFace(path=path, overrides={"n_layer": 2}), task)
    with pytest.raises(ValueError, match=r"is a gpt2, but model\.architecture is llama; make them agree"):
        build_chain(HuggingFace(path=path, architecture="llama"), task)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"weights .*model\.safetensors cannot be read: .*; save or fetch them again"):
        build_chain(HuggingFace(path=path), task)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../secret"}}')
    with pytest.raises(ValueError, match="no index of weight files: it names files outside its folder"):
        build_chain(HuggingFace(path=path), task)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
    """The hub's local cache, with no network beyond it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_hub_id_is_read_from_the_hubs_cache(hub_cache):
    commit = "0123456789012345678901234567890123456789"
    home = hub_cache / "models--someone--small"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    whole, _, task = save_whole("gpt2", home / "snapshots" / commit)
    chain = build_chain(HuggingFace(path="someone/small"), task, boundaries=[])
    assert torch.equal(chain.blocks[1].layer.mlp.c_fc.weight, whole.transformer.h[1].mlp.c_fc.weight)


def test_a_wrong_hub_id_is_named_with_the_remedy(hub_cache):
    with pytest.raises(
        ValueError, match=r"nobody/nothing is no folder, and as a hub id its config\.json is not in the loc"
    ):
        _ = HuggingFace(path="nobody/nothing").num_blocks
