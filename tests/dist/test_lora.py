"""LoRA: the numbers of PEFT in one process, and those of one process at any layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from megavlm.checkpoint.hf.hf_files import HfFolder
from megavlm.checkpoint.hf.pretrained import with_pretrained_model
from megavlm.command_line.parsing import parse
from megavlm.config.schema import Config
from megavlm.data.collate import CollateSpec, collate
from megavlm.data.synthetic import SyntheticSource
from megavlm.families import family_of
from megavlm.inputs.batch import MicroBatch
from megavlm.programs import chat, convert
from megavlm.rules.defaults import resolve
from tests.support import hf
from tests.support.covering import fast_and_slow, slow
from tests.support.flags import MODELS
from tests.support.gates import hold
from tests.support.harness import difference
from tests.support.peft_blocks import trained_entries, with_one_a
from tests.support.pool import Pools
from tests.support.tiny_models import FAMILIES, MIXTURES, SINGLE, scaled, square, tiny
from tests.support.training import SMALL, assert_same_curve, metrics, train, train_composed
from tests.support.whole_models import whole_folder

# Odd head counts that TP pads, shared embeddings, both parts.
LORA = (
    "--lora-rank 4 --lora-alpha 8 --lora-targets language vision --set model.language.num_query_groups=2 --lr 1e-3 "
    "--set model.vision.num_attention_heads=3 model.vision.hidden_size=36 model.language.tie_embeddings=true --freeze "
    "projector"
).split()
OTHERS = [name for name in SINGLE if name != "llava"]
TARGETS = {  # PEFT takes adapters of their MLPs for adapters of experts, but for those of a model that hears
    "omni": "language vision audio --set data.sound_frames=[9,0,4]",
    "gemma4-unified": "language --freeze vision projector",
    **dict.fromkeys(("glm4v-moe", "omni3-moe"), "q_proj k_proj v_proj o_proj"),
    "kimi-moe": "q_a_proj q_b_proj kv_b_proj q_proj k_proj v_proj o_proj",
}
LATENT = {"kimi-moe": ".q_b_proj"}  # what queries of latent attention are called
ATTENTION = "vision.layers.*.o_proj language.layers.*.q_proj"
EXPERTS = {
    "router": f"{ATTENTION} experts --set lora.train_router=true",
    "second": "vision.layers.*.o_proj experts.down_proj",
}
EXPERT_LAYOUTS = {"ep2": "--ep 2", "tp2-ep2-etp2": "--tp 2 --ep 2 --etp 2"}


# A rank that grouped products do not read, so that it is padded; a dense first layer; a shared expert.
OF_EXPERTS = (
    "--num-experts 4 --set model.experts.ffn_hidden_size=24 model.experts.dense_layers=[0] "
    "model.experts.shared_ffn_hidden_size=32 --lora-rank 3 --lora-alpha 12 --lora-targets language experts --freeze "
    "vision projector --lr 1e-2 --set lora.train_router=true --moe-aux-loss-coeff 0.1"
).split()
# The tower and the language model below the first adapter are frozen, and features of images pass by the adapters.
OF_SOUNDS = [*MODELS["audio"].split(), *"--lora-rank 3 --lora-targets audio language.layers.3.q_proj --lr 1e-2".split()]
OF_LATENTS = [*MODELS["latents"].split(), *"--lora-rank 3 --lora-targets language --freeze vision projector".split()]
FAST = (
    (2, OF_SOUNDS, "--tp 2"),
    (2, OF_SOUNDS, "--pp 2 --placement colocated"),
    (2, LORA, "--pp 2 --vpp 2 --recompute-granularity full --set execution.loss_chunk_tokens=2"),
    (2, LORA, "--tp 2 --no-sequence-parallel"),
    (2, OF_EXPERTS, "--tp 2 --micro-batch-size 2"),
)
SLOW = (
    (2, OF_SOUNDS, "--pp 2 --vpp 2 --pipeline-cuts 6 8 10"),
    (2, LORA, "--tp 2"),
    (4, LORA, "--tp 2 --pp 2 --vpp 2 --recompute-granularity full --set execution.loss_chunk_tokens=2"),
    (2, LORA, "--pp 2 --placement colocated --vision-tp 2"),
    (2, LORA, "--pp 2"),
    (2, LORA, ""),
    (4, LORA, "--tp 2 --data-parallel-sharding none"),
    (4, LORA, "--tp 2 --data-parallel-sharding full"),
    (4, OF_LATENTS, "--tp 2 --cp 2"),
    (4, OF_EXPERTS, "--tp 2 --ep 2 --etp 2"),
    (2, OF_EXPERTS, "--ep 2"),
    (4, OF_EXPERTS, "--ep 2 --etp 2 --data-parallel-sharding none"),
    (4, OF_EXPERTS, "--tp 2 --etp 1"),
    (4, OF_EXPERTS, "--pp 2 --vpp 2 --ep 2 --recompute-granularity full"),
    (2, OF_EXPERTS, "--cp 2 --ep 2 --moe-token-dispatcher-type allgather"),
    (4, OF_EXPERTS, "--tp 2 --ep 2 --overlap-grad-reduce --overlap-param-gather"),
)


@pytest.mark.parametrize(("world", "lora", "layout"), fast_and_slow(FAST, SLOW))
def test_layouts_train_alike(pools, alone, tmp_path, world, lora, layout):
    pools(world).run(train, [*SMALL, *lora, "--no-save", *layout.split()], str(tmp_path))
    assert_same_curve(metrics(tmp_path), alone([*SMALL, *lora]))


def test_stages_below_the_first_adapter(pools: Pools, tmp_path: Path) -> None:
    """Adapters in the last stage only: the one before trains nothing and gets no gradients."""
    targets = "--lora-targets language.layers.3.q_proj --freeze vision projector --train-iters 3 --no-save".split()
    argv = [*SMALL, *"--lora-rank 4 --lr-warmup-iters 0".split(), *targets]
    pools(1).run(train, argv, str(tmp_path / "one"))
    pools(2).run(train, [*argv, "--pp", "2"], str(tmp_path / "two"))
    assert_same_curve(metrics(tmp_path / "two"), metrics(tmp_path / "one"))


@pytest.mark.parametrize(
    ("lora", "layouts"),
    [
        (LORA, ((2, "--tp 2 --micro-batch-size 2 --train-iters 3"), (2, "--pp 2 --no-save"))),
        slow(OF_EXPERTS, ((4, "--tp 2 --ep 2 --etp 2 --train-iters 2"), (2, "--ep 2 --train-iters 3"), (2, "--tp 2"))),
    ],
)
def test_adapters_move_between_layouts(pools: Pools, alone: Any, tmp_path: Path, lora: list[str], layouts: Any) -> None:
    """Curves alone do not see rows of B, which begins at zero, in the wrong place: another layout's next steps do."""
    for world, layout in layouts:
        pools(world).run(train, [*SMALL, *lora, *layout.split()], str(tmp_path))
    assert_same_curve(metrics(tmp_path), alone([*SMALL, *lora]))


@pytest.mark.parametrize(
    ("family", "targets", "layout"),
    [
        slow("llava", "language vision", "--tp 2 --pp 2"),
        ("llava", "q_proj language.layers.1.down_proj vision.layers.*.fc1", "--tp 2 --pp 2"),
        slow("internvl-moe", EXPERTS["router"], "--tp 2 --ep 2 --pp 2", id="internvl-moe-router-tp2-ep2-pp2"),
        *(slow(name, TARGETS.get(name, "language vision"), "--tp 2 --pp 2") for name in OTHERS),
        *(
            slow(name, targets.replace(".q_proj", LATENT.get(name, ".q_proj")), layout, id=f"{name}-{what}-{where}")
            for name in MIXTURES
            if not name.startswith("text-")  # their models take no images
            for what, targets in EXPERTS.items()
            if (name, what) != ("gemma4-moe", "router") and "gpt-oss" not in name  # which are refused
            for where, layout in EXPERT_LAYOUTS.items()
        ),
    ],
)
def test_trained_adapters_are_pefts(pools: Pools, tmp_path: Path, family: str, targets: str, layout: str) -> None:
    """Five steps of four processes and in PEFT from the same A and B; then logits of PEFT, merged and ours."""
    # Tensor-parallel ranks cannot share the adapter of a key/value head.
    theirs = tiny("gemma3", text={"num_key_value_heads": 2}) if family == "gemma3" else FAMILIES[family][0]()
    folder = hf.save(theirs, tmp_path / "hf")
    name = hf.family_in(folder)
    frozen = "projector audio" if "omni" in family and "experts" in targets else "projector"
    argv = (
        f"--init-from {folder} --lora-rank 3 --lora-alpha 6 --freeze {frozen} --lora-targets {targets} "
        f"--global-batch-size 4 --seq-length {hf.LENGTH} --lr 1e-2 --lr-decay-style constant --weight-decay 0 "
        f"--adam-beta2 0.999 --clip-grad 0 --no-tensorboard --precision fp32 --image-sizes {square(family)}"
    ).split()
    # Layout does not matter to what is drawn: the adapters before training come from a run of one step at no rate.
    start, run = tmp_path / "start", tmp_path / "run"
    pools(1).run(train_composed, [*argv, *"--train-iters 1 --lr 1e-30".split()], str(start))
    pools(4).run(train_composed, [*argv, *layout.split(), *"--train-iters 5".split()], str(run))
    assert convert.main(["export-lora", str(start), str(tmp_path / "start-adapters")]) == 0
    assert convert.main(["export-lora", str(run), str(tmp_path / "adapters")]) == 0
    assert convert.main(["merge-lora", str(run), str(tmp_path / "merged")]) == 0

    modes = {path.name: path.stat().st_mode for path in (tmp_path / "adapters").iterdir()}
    assert len(set(modes.values())) == 1, modes
    theirs = peft_model(folder, tmp_path / "start-adapters", trainable=True)
    losses = train_with_peft(theirs, argv, steps=5)
    for ours, expected in zip(metrics(run), losses, strict=True):
        hold(name, "lora_losses", abs(ours["loss"] - expected) / expected, f"iteration {ours['iteration']}")

    trained = peft_model(folder, tmp_path / "adapters", trainable=False)
    config, (batch, *_) = synthetic_batches(argv, steps=1)
    inputs = inputs_of(batch, config)
    with torch.no_grad():
        expected = trained(**inputs).logits
        base = load(folder)(**inputs).logits
        merged = load(tmp_path / "merged")(**inputs).logits
        drifted = theirs.eval()(**inputs).logits
    assert (expected - base).abs().max() > 1e-2, "training has changed nothing"
    hold(name, "lora_merged", difference(merged, expected, "logits"))
    torch.testing.assert_close(drifted, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


def load(folder: Path) -> Any:
    return scaled(transformers.AutoModelForImageTextToText.from_pretrained(folder)).eval()


def peft_model(folder: Path, adapters: Path, *, trainable: bool) -> Any:
    return with_one_a(peft.PeftModel.from_pretrained(load(folder), adapters, is_trainable=trainable))


def train_with_peft(theirs: Any, argv: list[str], *, steps: int) -> list[float]:
    """AdamW on the same synthetic batches as the run."""
    config, batches = synthetic_batches(argv, steps=steps)
    trained = {name: param for name, param in theirs.named_parameters() if param.requires_grad}
    for name, param in trained.items():
        if "lora_B" in name and ".experts." not in name:
            param.register_hook(partial(torch.mul, trained_entries(name, param, config)))
    adamw = torch.optim.AdamW(trained.values(), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    losses = []
    for batch in batches:
        logits = theirs(**inputs_of(batch, config)).logits
        labels = torch.where(batch.text.loss_mask.bool(), batch.text.labels, -100)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        losses.append(loss.item())
    return losses


def synthetic_batches(argv: list[str], *, steps: int) -> tuple[Config, list[MicroBatch]]:
    """Return the run's configuration, and each of its global batches as one micro-batch."""
    config = resolve(with_pretrained_model(parse(argv)))
    source = SyntheticSource(config)
    samples = [[source.sample(4 * step + number) for number in range(4)] for step in range(steps)]
    return config, [collate([[each] for each in four], CollateSpec.of(config, source)) for four in samples]


def inputs_of(batch: MicroBatch, config: Config) -> dict[str, Any]:
    """Return the keyword arguments of the Transformers model for a micro-batch."""
    family = family_of(HfFolder(Path(str(config.checkpoint.init_from))).settings)
    return family.inputs(batch, config.model)


def test_what_adapters_do_not_hold_is_not_lost(pools, tmp_path, capsys):
    folder = hf.save(tiny("llava"), tmp_path / "hf")
    flags = f"--lora-rank 2 --seq-length {hf.LENGTH} --train-iters 1 --no-tensorboard --freeze vision"
    pools(1).run(train_composed, ["--init-from", str(folder), *flags.split()], str(tmp_path / "run"))
    assert convert.main(["export-lora", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "also trained projector whole" in capsys.readouterr().err
    assert convert.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "use merge-lora for whole weights" in capsys.readouterr().err
    assert convert.main(["verify", str(folder), str(tmp_path / "run")]) == 2
    assert "fold them in with merge-lora" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_with_adapters_answers_as_its_merged_weights(pools, tmp_path, capsys):
    folder, _, _ = whole_folder("llava", tmp_path)
    argv = (
        f"--init-from {folder} --data synthetic --lora-rank 3 --lora-targets language --freeze vision projector "
        "--train-iters 3 --global-batch-size 2 --seq-length 64 --lr 0.1 --lr-warmup-iters 0 --precision fp32 "
        "--no-tensorboard"
    ).split()
    pools(1).run(train, argv, str(tmp_path / "run"), with_pretrained_model)
    assert convert.main(["merge-lora", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    answers = []
    for model in (tmp_path / "run", tmp_path / "merged", folder):
        capsys.readouterr()
        assert chat.main([str(model), "--prompt", "Which?", "--max-new-tokens", "8", "--device", "cpu"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0].strip()
    assert answers[0] == answers[1] != answers[2]
