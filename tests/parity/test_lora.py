"""Adapters against PEFT's in one process: the gradient of each A and B, with and without dropout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.utils import transformers_weight_conversion

from megavlm.checkpoint.hf.adapters import (
    PREFIX,
    factors_of_experts,
    grouped,
    peft_adapters,
    table_in_memory,
    write_adapters,
)
from megavlm.checkpoint.hf.pretrained import ALL_PARTS, Pretrained
from megavlm.config.lora_config import all_names
from megavlm.config.schema import Config, LoraConfig
from megavlm.train.engine import Engine
from tests.support import hf
from tests.support.covering import slow
from tests.support.gates import hold
from tests.support.harness import Single, difference
from tests.support.peft_blocks import trained_entries
from tests.support.tiny_models import FAMILIES, SINGLE, tiny


def lora_run(folder: Path, single: Single, dropout: float) -> tuple[Config, Engine]:
    """An engine whose adapters are no longer at their start, where B is zero and A has no gradient."""
    config = hf.config_for(folder)
    targets = ("language", "vision", *(["experts"] if config.model.experts.num_experts else []))
    lora = LoraConfig(rank=3, alpha=6.0, dropout=dropout, targets=targets)
    config = replace(config, lora=lora, model=replace(config.model, freeze=("projector",)))
    engine = hf.engine_for(config, folder, single)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in trained(engine).values():
            param.copy_(0.2 * torch.randn(param.shape, generator=generator))
    return config, engine


def trained(engine: Engine) -> dict[str, Any]:
    """Trained parameters by the names that checkpoints give them."""
    return {
        name.replace(".mlp.experts.", ".mlp.experts.experts."): param
        for name, param in engine.chunks[0].module.named_parameters()
        if param.requires_grad
    }


def every_other_channel(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout whose mask both sides know, whatever the order of their dimensions."""
    if not training or not p:
        return x
    return x * (torch.arange(x.shape[-1]) % 2) / (1 - p)


@pytest.mark.parametrize(
    ("family", "dropout"), [("llava", 0.0), ("llava", 0.5), *(slow(name, 0.0) for name in SINGLE if name != "llava")]
)
def test_gradients_are_pefts(family, dropout, single, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "dropout", every_other_channel)
    # PEFT takes adapters of any MLP of GLM-4.5V for adapters of its experts, and export-lora refuses them.
    monkeypatch.setattr(transformers_weight_conversion, "_MOE_TARGET_MODULE_MAPPING", {})
    build, (images, *_) = FAMILIES[family]
    base = build()
    folder = hf.save(base, tmp_path / "hf")
    config, engine = lora_run(folder, single, dropout)
    pretrained = Pretrained.of(folder, *ALL_PARTS)
    table = table_in_memory(pretrained.family, config.model)
    held = grouped(trained(engine), config.model)
    adapted = sum(len(adapters.pairs) for key, adapters in held.items() if key.startswith("language."))
    assert adapted == sum(name.startswith("language.") for name in all_names(config))
    write_adapters(*peft_adapters(held, table, config.lora), tmp_path / "adapters")
    theirs: Any = peft.PeftModel.from_pretrained(base, tmp_path / "adapters", is_trainable=True).train()

    given = hf.batch_of(config, images)
    loss, _ = hf.loss_of(theirs, pretrained, given, config)
    loss.backward()
    engine.optimizer.zero_grad()
    loss_sum, tokens = engine.schedule.train([given]).tolist()
    assert loss_sum / tokens == pytest.approx(loss.item(), rel=1e-5)

    gradients = grouped({name: param.main_grad / tokens for name, param in trained(engine).items()}, config.model)
    expected = {name: param.grad for name, param in theirs.named_parameters() if param.requires_grad}
    of_experts = factors_of_experts(gradients, table).values()
    for name, ours in (each for factors in of_experts for each in factors.items()):
        wanted = expected.pop(name.replace(".weight", ".default.weight"))
        assert wanted.abs().max() > 1e-7, f"{name} has no gradient to compare"
        hold(pretrained.family.name, "lora_gradients", difference(ours, wanted, name), f"gradient of {name}")
    for key, adapters in gradients.items():
        if adapters.of_experts is not None:
            continue
        for weight, pair in adapters.by_hf_name(table[key]).items():
            for letter, ours in zip("AB", pair, strict=True):
                name = f"{PREFIX}{weight.removesuffix('.weight')}.lora_{letter}.default.weight"
                wanted = expected.pop(name)
                wanted = wanted * trained_entries(name, wanted, config) if letter == "B" else wanted
                assert wanted.abs().max() > 1e-7, f"{name} has no gradient to compare"
                hold(pretrained.family.name, "lora_gradients", difference(ours, wanted, name), f"gradient of {name}")
    assert not expected, "adapters of PEFT's that ours lack"


def test_dropout_acts_in_training_only(single: Single, tmp_path: Path) -> None:
    folder = hf.save(tiny("llava"), tmp_path / "hf")
    losses, evaluated = {}, {}
    for dropout in (0.0, 0.3):
        config, engine = lora_run(folder, single, dropout)
        given = hf.batch_of(config)
        losses[dropout] = [engine.schedule.train([given])[0].item() for _ in range(3)]
        with engine.evaluation():
            evaluated[dropout] = engine.schedule.logits([given])[0]
    assert len(set(losses[0.0])) == 1
    assert len({losses[0.0][0], *losses[0.3]}) == 4, "each step draws another mask"
    assert evaluated[0.0].equal(evaluated[0.3])


def test_dropout_keeps_the_mean(single: Single, tmp_path: Path) -> None:
    _, engine = lora_run(hf.save(tiny("llava"), tmp_path / "hf"), single, 0.3)
    layer = engine.chunks[0].module.get_submodule("language.layers.0.self_attention.linear_qkv.lora").train()
    ones = torch.ones(1000, 100)
    for differs in (False, True):
        dropped: Any = layer.drop(ones, differs=differs)  # type: ignore[operator]
        assert dropped.unique().tolist() == [0.0, pytest.approx(1 / 0.7)]
        # The share of 100,000 that is dropped: its standard deviation is 0.0014.
        assert (dropped == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
