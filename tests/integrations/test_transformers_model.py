"""A stack as AutoModelForCausalLM of transformers: folders, generation, Trainer, peft, packing and losses."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deltazoo
from deltazoo import Sampling, StackSpec
from deltazoo.backends.io.errors import ConfigError, InputError, StateError, UnsupportedError

transformers = pytest.importorskip("transformers")

from tiny_models import perturbed  # noqa: E402

from deltazoo.integrations.transformers import (  # noqa: E402
    DeltazooConfig,
    DeltazooForCausalLM,
    StackCache,
    join_fused_maps,
    register,
    split_fused_maps,
)

VOCAB, T = 41, 13


@pytest.fixture(autouse=True)
def token_by_token() -> Iterator[None]:
    """The interface is tested, so the reference computes the updates: other backends compile each spec."""
    register()
    with deltazoo.use_backend("reference"):
        yield


def stack(**fields: Any) -> StackSpec:
    layers = {
        "gdn": {"mixer": "gated_deltanet", "heads": 2, "key_width": 8, "value_width": 8},
        "attn": {"mixer": "attention", "heads": 2},
        "ssm": {"mixer": "mamba2", "value_width": 16, "key_width": 8},
    }
    return StackSpec(
        **{"width": 32, "vocab": VOCAB, "depth": 3, "pattern": "gdn + ssm + attn", "layers": layers, **fields}
    )


def build(**fields: Any) -> Any:
    torch.manual_seed(0)
    return perturbed(transformers.AutoModelForCausalLM.from_config(DeltazooConfig(stack=stack(**fields))))


def tokens(batch: int = 2, length: int = T, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_folder_is_read_with_equal_weights_and_logits(tied: bool, tmp_path: Path) -> None:
    model = build(tied=tied)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "deltazoo" and StackSpec(**config["stack"]) == stack(tied=tied)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(loaded) is DeltazooForCausalLM
    for (name, ours), (other, theirs) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other and torch.equal(ours, theirs)
    assert torch.equal(loaded.eval()(tokens()).logits, model(tokens()).logits)
    halves = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map={"": "cpu"})
    assert halves.dtype == torch.bfloat16 and halves(tokens()).logits.isfinite().all()


def test_a_model_of_ours_is_saved_as_one_of_transformers(tmp_path: Path) -> None:
    ours = stack().build().eval()
    DeltazooForCausalLM.of(ours).save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens()).logits, ours(tokens(), None)[0])


def test_weights_that_a_folder_lacks_are_drawn(tmp_path: Path) -> None:
    model = build()
    state = {name: x for name, x in model.state_dict().items() if "to_qkv" not in name and "A_log" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, x in loaded.state_dict().items():
        assert x.isfinite().all() and (name not in state or torch.equal(x, state[name]))
    assert float(loaded.model.stack.layers[0].mixers[0].project.to_qkv.weight.detach().std()) > 0.01


def test_generation_equals_ours_also_with_left_padding() -> None:
    model, prompt = build(), tokens()
    ours = model.model.generate(prompt, Sampling(max_tokens=6, temperature=0))
    theirs = model.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(theirs[:, T:], ours)
    assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=False), theirs)
    padded, mask = prompt.clone(), torch.ones_like(prompt)
    padded[1, :5], mask[1, :5] = 0, 0
    batch = model.generate(padded, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    alone = model.generate(prompt[1:, 5:], max_new_tokens=6, do_sample=False)
    assert torch.equal(batch[1, T:], alone[0, T - 5 :])
    assert torch.equal(batch[0], theirs[0])


def test_beams_take_the_states_of_their_parents() -> None:
    model, prompt = build(), tokens(2, 5)
    options: dict[str, Any] = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False}
    cached = model.generate(prompt, **options)
    assert torch.equal(cached, model.generate(prompt, use_cache=False, **options))


def test_calls_with_a_cache_equal_one_call() -> None:
    model, ids = build(), tokens()
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :7], use_cache=True)
        rest = model(ids[:, 7:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole, rtol=1e-4, atol=1e-5)
    assert isinstance(first.past_key_values, StackCache) and first.past_key_values.get_seq_length() == T
    with pytest.raises(StateError, match="StackCache"):
        model(ids, past_key_values=transformers.DynamicCache())
    with pytest.raises(UnsupportedError, match="inputs_embeds"):
        model(ids, inputs_embeds=torch.zeros(1))


def test_losses_with_and_without_logits_and_over_micro_batches_are_equal() -> None:
    model, ids = build(), tokens()
    labels = ids.clone()
    labels[0, :4] = -100
    evaluated = model(ids, labels=labels).loss
    trained = model.train()(ids, labels=labels)
    logits = model(ids).logits
    wanted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    items = (labels[:, 1:] != -100).sum()
    halves = sum(model(ids[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=items).loss for i in range(2))
    assert trained.logits is None
    for loss in (evaluated, trained.loss, halves):
        torch.testing.assert_close(loss, wanted)


def test_packed_sequences_do_not_see_each_other() -> None:
    model, ids = build(), tokens(1)
    bounds = torch.tensor([0, 4, T])
    packed = model(ids, cu_seq_lens_q=bounds).logits
    apart = torch.cat([model(ids[:, :4]).logits, model(ids[:, 4:]).logits], 1)
    torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-5)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        row = tokens(1, T, seed=i)[0]
        return {"input_ids": row, "labels": row}


def test_the_trainer_reduces_the_loss_with_checkpointed_layers_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = build()
    before = model(tokens(), labels=tokens()).loss
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=6, learning_rate=1e-2,
        activation_checkpointing=True, save_steps=3, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        eval_strategy="steps", eval_steps=3,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train()
    assert model.is_gradient_checkpointing
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] and trainer.evaluate()["eval_loss"] < float(before)
    resumed = transformers.Trainer(build(), arguments, train_dataset=Rows(), eval_dataset=Rows())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for ours, theirs in zip(resumed.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_lora_trains_its_maps_alone_and_its_adapter_is_read_again(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["project.to_qkv", "to_qkv", "mlp.out"])
    adapted = peft.get_peft_model(build(), config)
    adapted(tokens(), labels=tokens()).loss.backward()
    trained = [name for name, p in adapted.named_parameters() if p.grad is not None]
    assert trained and all("lora_" in name for name in trained)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    ours = adapted.generate(input_ids=tokens(), max_new_tokens=5, do_sample=False)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(build(), tmp_path)
    assert torch.equal(again.generate(input_ids=tokens(), max_new_tokens=5, do_sample=False), ours)
    merged = adapted.merge_and_unload().eval()
    assert torch.equal(merged.generate(tokens(), max_new_tokens=5, do_sample=False), ours)


def test_lora_adapts_parts_of_fused_maps(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = build()
    logits = model(tokens()).logits
    names = split_fused_maps(model)
    assert {name.rpartition(".")[2] for name in names} == {"q", "k", "v"} and len(names) == 9
    torch.testing.assert_close(model(tokens()).logits, logits)
    parts = ["to_qkv.q", "to_qkv.v"]
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=parts, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted(tokens(), labels=tokens()).loss.backward()
    trained = [name for name, p in adapted.named_parameters() if p.grad is not None]
    assert len(trained) == 3 * 2 * 2 and all(".q." in name or ".v." in name for name in trained)
    ours = adapted.eval()(tokens()).logits
    with pytest.raises(InputError, match="merge the adapters"):
        join_fused_maps(adapted)
    merged = adapted.merge_and_unload()
    join_fused_maps(merged)
    torch.testing.assert_close(merged.eval()(tokens()).logits, ours, rtol=1e-4, atol=1e-5)
    assert set(merged.state_dict()) == set(build().state_dict())
    with pytest.raises(InputError, match="no linear map"):
        split_fused_maps(torch.nn.Linear(2, 2))


def test_a_config_that_names_a_class_of_another_package_is_refused() -> None:
    data = {"width": 32, "vocab": VOCAB, "depth": 1, "pattern": "x", "layers": {"x": {"mixer": "os:path"}}}
    with pytest.raises(ConfigError, match="os"):
        DeltazooConfig(stack=data)
