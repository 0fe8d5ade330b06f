"""A VLM composed of an encoder and a language model: trains at any layout, and leaves as a LLaVA of Transformers."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from transformers.models.idefics2.modeling_idefics2 import Idefics2PerceiverResampler
from transformers.models.internvl import InternVLVisionConfig, InternVLVisionModel

from examples.first_run import ask
from megavlm.arch.connector import Connector
from megavlm.checkpoint import folders
from megavlm.checkpoint.hf.checkpoint_reader import CheckpointReader
from megavlm.checkpoint.hf.pretrained import with_pretrained_model
from megavlm.checkpoint.hf.sidecar import exportable
from megavlm.config.registry import registered
from megavlm.config.schema import CheckpointConfig, Config, DataConfig
from megavlm.data.types import Conversation, ImageRef, Turn
from megavlm.errors import UserError
from megavlm.families import FAMILIES
from megavlm.inference.assistant import Assistant
from megavlm.programs import chat, compare, convert
from megavlm.programs.evaluation import evaluate
from megavlm.rules.load import from_yaml_file
from tests.support import hf, tokenizers
from tests.support.covering import fast_and_slow, slow
from tests.support.flags import MODELS
from tests.support.gates import hold
from tests.support.pool import Pools
from tests.support.processors import picture
from tests.support.tiny_models import TEXT, TOWER, tiny
from tests.support.training import assert_same_curve, farthest_apart, metrics, train_composed

PARTS = ("vision", "projector", "language")
RUN = [
    *"--precision fp32 --train-iters 5 --global-batch-size 4 --seq-length 40".split(),
    *"--lr 1e-3 --no-tensorboard --image-token 60".split(),
]
torch.manual_seed(1)  # each run has the same weights: with a rare draw, rounding grows beyond 1e-5 in five steps
CLIP = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**TOWER))
SIGLIP = transformers.SiglipModel(transformers.SiglipConfig(vision_config=TOWER, text_config=TOWER))


@pytest.mark.parametrize(
    ("tower", "layer", "text"),
    [
        pytest.param(CLIP, "-2", transformers.Qwen2Config(**TEXT), id="clip-qwen2"),
        slow(SIGLIP, "-3", transformers.MistralConfig(**TEXT, sliding_window=None), id="siglip-mistral"),
        slow(SIGLIP, "-2", transformers.LlamaConfig(**TEXT), id="siglip-llama"),
        slow(CLIP, "-2", transformers.Qwen3Config(**TEXT), id="clip-qwen3"),
    ],
)
def test_compose_train_and_export(pools, tower, layer, text, tmp_path):
    hold_composed(pools, tower, text, tmp_path, layer=layer)

    exported = tmp_path / "exported"
    assert convert.main(["export", str(tmp_path / "four"), str(exported)]) == 0
    theirs = transformers.LlavaForConditionalGeneration.from_pretrained(exported)
    assert convert.main(["verify", str(exported), str(tmp_path / "four")]) == 0
    assert torch.isfinite(theirs.lm_head.weight).all()
    assert (exported / "tokenizer_config.json").exists()


@pytest.mark.slow
def test_an_intern_vit_composes(pools: Pools, tmp_path: Path) -> None:
    """Of it and Qwen3 no model of Transformers consists, so an export has a folder for each part."""
    tower = InternVLVisionModel(InternVLVisionConfig(**{**TOWER, "image_size": [32, 32], "patch_size": [8, 8]}))
    hold_composed(pools, tower, transformers.Qwen3Config(**TEXT), tmp_path, layer="-1")
    hold_parts(pools, tmp_path / "four", [*RUN, "--train-iters", "2"], tmp_path)
    InternVLVisionModel.from_pretrained(tmp_path / "exported/vision")


def hold_composed(pools: Pools, tower: Any, text: transformers.PreTrainedConfig, folder: Path, *, layer: str) -> None:
    """Check that four processes have the losses of one, and note the difference in the cards of both folders."""
    torch.manual_seed(1)
    vision = hf.save(deepcopy(tower), folder / "vision")  # which changes the weights
    language = hf.save(transformers.AutoModelForCausalLM.from_config(text), folder / "language")
    argv = [*RUN, "--vision-from", str(vision), "--language-from", str(language)]
    argv += ["--set", f"model.vision.feature_layer={layer}"]
    pools(1).run(train_composed, argv, str(folder / "one"))
    pools(4).run(train_composed, [*argv, *"--tp 2 --pp 2".split()], str(folder / "four"))
    four, one = metrics(folder / "four"), metrics(folder / "one")
    assert_same_curve(four, one)
    for each in (vision, language):
        hold(hf.family_in(each), "composed", *farthest_apart(four, one))


def test_parts_of_larger_models_compose_whatever_the_rest_of_those_is(pools: Pools, tmp_path: Path) -> None:
    """The tower of a LLaVA and the language model of another: their other halves have other sizes and do not matter."""
    larger = {**TEXT, "num_key_value_heads": 4, "hidden_size": 48, "num_hidden_layers": 3}
    vision = hf.save(tiny("llava", text=larger), tmp_path / "vision")
    language = hf.save(tiny("llava"), tmp_path / "language")
    argv = [*RUN, "--vision-from", str(vision), "--language-from", str(language), "--train-iters", "1"]
    pools(1).run(train_composed, argv, str(tmp_path / "run"))
    exported = tmp_path / "exported"
    assert convert.main(["export", str(tmp_path / "run"), str(exported)]) == 0
    theirs = transformers.LlavaForConditionalGeneration.from_pretrained(exported)
    assert theirs.config.text_config.num_key_value_heads == TEXT["num_key_value_heads"]
    assert convert.main(["verify", str(exported), str(tmp_path / "run")]) == 0


CONNECTORS = {
    **{name: MODELS[name] for name in ("qformer", "perceiver", "adaptive-pool", "c-abstractor")},
    # As wide inside as Idefics2's, which Transformers reads.
    "idefics2-perceiver": "--projector-kind perceiver --set model.projector.connectors.perceiver.num_latents=5 "
    "model.projector.connectors.perceiver.num_layers=2 model.projector.connectors.perceiver.num_attention_heads=6 "
    "model.projector.connectors.perceiver.num_query_groups=3 model.projector.connectors.perceiver.kv_channels=4",
    # What a LLaVA does not have; with a tower of its own, an MLP as well.
    "linear": "--projector-kind linear --set model.projector.bias=false",
    "gated": "--projector-kind gated --set model.projector.pixel_shuffle=2 model.projector.input_norm=true "
    "model.projector.hidden_size=28",
    "convolution": "--projector-kind mlp --set model.projector.pixel_shuffle=2 model.projector.merge=convolution "
    "model.projector.merge_bias=true model.projector.input_norm=true model.projector.norm_before_merge=true "
    "model.projector.normalization=RMSNorm",
    "c-abstractor-as-wide": "--projector-kind c_abstractor --set model.projector.connectors.c_abstractor.side=3 "
    "model.projector.connectors.c_abstractor.depth=1 model.projector.connectors.c_abstractor.hidden_size=36",
}
# The module of Transformers that reads a connector, and what it has no room for.
MODULES = {
    "qformer": (
        transformers.Blip2QFormerModel,
        {"query_tokens", "language_projection.weight", "language_projection.bias"},
    ),
    "idefics2-perceiver": (
        Idefics2PerceiverResampler,
        {f"modality_projection.{name}_proj.weight" for name in ("gate", "up", "down")},
    ),
}


@pytest.mark.parametrize("connector", fast_and_slow(["qformer"], CONNECTORS))
def test_other_connectors_leave_as_a_folder_for_each_part_and_come_back(pools, connector, tmp_path, capsys):
    """A run that takes the parts and adapts the language model alone writes the others as they came, byte for byte."""
    vision = hf.save(CLIP, tmp_path / "vision")
    text = transformers.LlamaConfig(**TEXT)
    language = hf.save(transformers.AutoModelForCausalLM.from_config(text), tmp_path / "language")
    few = [*RUN, "--train-iters", "2"]
    argv = [*few, "--vision-from", str(vision), "--language-from", str(language), *CONNECTORS[connector].split()]
    pools(2).run(train_composed, [*argv, "--tp", "2"], str(tmp_path / "run"))
    out = tmp_path / "exported"
    assert convert.main(["export", str(tmp_path / "run"), str(out)]) == 0
    assert (out / "language" / "tokenizer_config.json").read_text() == (language / "tokenizer_config.json").read_text()
    for part, source in (("vision", vision), ("language", language)):
        trained, given = (load_file(folder / "model.safetensors") for folder in (out / part, source))
        assert trained.keys() == given.keys()
        assert any(not torch.equal(trained[name], given[name]) for name in trained)
    transformers.CLIPVisionModel.from_pretrained(out / "vision")
    transformers.LlamaForCausalLM.from_pretrained(out / "language")
    if connector in MODULES:
        module, beside = MODULES[connector]
        theirs, found = module.from_pretrained(out / "projector", output_loading_info=True)
        assert (set(found["missing_keys"]), set(found["unexpected_keys"])) == (set(), beside)
        written = load_file(out / "projector" / "model.safetensors")
        assert all(torch.equal(value, written[name]) for name, value in theirs.state_dict().items())

    with pytest.raises(UserError, match=r"consists of parts .* export"):
        exportable(tmp_path / "run")  # as verify does
    assert convert.main(["verify", str(out), str(tmp_path / "run")]) == 2
    assert "consists of parts, which no class of Transformers has together" in capsys.readouterr().err
    assert convert.main(["verify", str(out / "language")]) == 0

    hold_parts(pools, tmp_path / "run", few, tmp_path)


def hold_parts(pools: Pools, run: Path, few: list[str], folder: Path) -> None:
    """Check that a run that takes the parts and adapts the language model alone writes the others byte for byte.

    `folder` then has the export of the run, `exported`, and that of the other one, `twice`.
    """
    out = folder / "exported"
    if not out.exists():
        assert convert.main(["export", str(run), str(out)]) == 0
    trained = CheckpointReader(folders.resolve(run)).stored
    assert len(load_file(out / "projector/model.safetensors")) == sum(key.startswith("projector.") for key in trained)
    again = [*few, *(flag for part in PARTS for flag in (f"--{part}-from", str(out / part)))]
    lora = "--lora-rank 2 --lora-targets language --freeze vision projector".split()
    pools(1).run(train_composed, [*again, *lora], str(folder / "again"))
    assert convert.main(["merge-lora", str(folder / "again"), str(folder / "twice")]) == 0
    for part in PARTS:
        files = [each / part / "model.safetensors" for each in (out, folder / "twice")]
        assert (files[0].read_bytes() == files[1].read_bytes()) == (part != "language"), part
        configs = [each / part / "config.json" for each in (out, folder / "twice")]
        assert configs[0].read_bytes() == configs[1].read_bytes(), part


@pytest.mark.slow
def test_parts_of_larger_models_leave_alone(pools: Pools, tmp_path: Path) -> None:
    """The tower and the language model of a LLaVA with a Q-Former: a folder of each has nothing else in it."""
    whole = hf.save(tiny("llava"), tmp_path / "whole")
    few = [*RUN, "--train-iters", "2"]
    argv = [*few, "--vision-from", str(whole), "--language-from", str(whole), *CONNECTORS["qformer"].split()]
    pools(2).run(train_composed, [*argv, "--tp", "2"], str(tmp_path / "run"))
    hold_parts(pools, tmp_path / "run", few, tmp_path)
    given = load_file(whole / "model.safetensors")
    found = {part: load_file(tmp_path / "exported" / part / "model.safetensors") for part in ("vision", "language")}
    assert all("vision" in name for name in found["vision"])
    assert found["vision"].keys() | found["language"].keys() == {name for name in given if "projector" not in name}


def test_an_encoder_of_another_kind_is_refused(tmp_path: Path) -> None:
    language = hf.save(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TEXT)), tmp_path / "language")
    options = CheckpointConfig(vision_from=str(language))
    with pytest.raises(UserError, match="is a qwen2 checkpoint, which has no vision"):
        with_pretrained_model(Config(checkpoint=options))


ASKED = "Which is the largest?"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
# A composed model with latent attention is exported in parts, which Transformers does not read as one.
LANGUAGES = [
    name for each in FAMILIES if each.parts == ("language",) for name in each.model_types if "deep" not in name
]
TOWERS = {
    "clip": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**TOWER)),
    "siglip": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**TOWER)),
    "llava": lambda: tiny("llava"),
}
SIDE = {"height": 32, "width": 32}
PIXELS = {
    "clip": lambda: transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=SIDE),
    "siglip": lambda: transformers.SiglipImageProcessor(size=SIDE),
    "llava": lambda: transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=SIDE),
}
ASKED_RUN = "--precision fp32 --train-iters 1 --global-batch-size 1 --seq-length 128 --lr 1e-3 --no-tensorboard".split()


def begun(root: Path, tower: str, language: str) -> list[str]:
    """Return the options of a run that composes two folders and trains on a record."""
    vision = hf.save(TOWERS[tower](), root / "vision")
    PIXELS[tower]().save_pretrained(vision)
    (vision / "chat_template.json").write_text('{"chat_template": "of the larger model"}')
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizers.tokenizers_in(root)["qwen"])
    sizes = {**TEXT, "vocab_size": 512, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    extra = {"sliding_window": None} if language == "mistral" else EXPERTS if "moe" in language else {}
    config = transformers.AutoConfig.for_model(language, **sizes, **extra)
    words = hf.save(transformers.AutoModelForCausalLM.from_config(config), root / "language")
    tokenizer.save_pretrained(words)
    (words / "chat_template.jinja").write_text(tokenizers.TEMPLATES["qwen2"])
    Image.fromarray(picture(60, 90)).save(root / "0.png")
    turns = [{"from": "human", "value": f"<image>\n{ASKED}"}, {"from": "gpt", "value": "A cat."}]
    (root / "train.jsonl").write_text(json.dumps({"image": "0.png", "conversations": turns}) + "\n")
    (root / "questions.jsonl").write_text(json.dumps({"image": "0.png", "question": ASKED, "answers": ["A cat."]}))
    given = ["--vision-from", str(vision), "--language-from", str(words), "--datasets", str(root / "train.jsonl")]
    return [*ASKED_RUN, "--num-workers", "0", *given]


@pytest.mark.parametrize(
    ("tower", "language"),
    [
        *(slow("clip", each) for each in LANGUAGES if each != "mistral"),
        *(("clip", "mistral"), ("siglip", "qwen3"), ("llava", "llama")),
    ],
)
def test_transformers_alone_answers_on_the_export(pools, tower, language, tmp_path, capsys):
    pools(1).run(train_composed, begun(tmp_path, tower, language), str(tmp_path / "run"))
    out = tmp_path / "exported"
    assert convert.main(["export", str(tmp_path / "run"), str(out)]) == 0
    if language == "gpt_oss":  # with sinks no LLaVA is composed: in parts, too
        assert convert.main(["verify", str(out / "language")]) == 0
        return
    assert convert.main(["verify", str(out), str(tmp_path / "run")]) == 0
    ask.main(str(out), str(tmp_path / "0.png"), ASKED)

    processor = transformers.AutoProcessor.from_pretrained(out)
    messages: Any = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ASKED}]}]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    image = Image.open(tmp_path / "0.png")
    theirs = processor(images=image, text=prompt, add_special_tokens=False, return_tensors="pt")
    for folder in (out, tmp_path / "language"):
        assistant = Assistant.load(out, DataConfig(tokenizer=str(folder)), device=torch.device("cpu"))
        turn = Turn("user", (ImageRef(tmp_path / "0.png"), ASKED))
        ours = assistant.inputs([assistant.source.prompt(Conversation((turn,)))])
        assert ours["input_ids"].tolist() == theirs["input_ids"].tolist(), "also with the template of training"
        torch.testing.assert_close(ours["pixel_values"], theirs["pixel_values"], rtol=0, atol=0.02)


def test_a_language_model_is_trained_alone_and_answers(pools: Pools, tmp_path: Path, capsys: Any) -> None:
    """It reads no images: not of the data, before the first step, and not in a question."""
    *_, seen = begun(tmp_path, "clip", "qwen3")
    argv = [*ASKED_RUN, "--num-workers", "0", "--init-from", str(tmp_path / "language"), "--datasets"]
    with pytest.raises(AssertionError, match=r"a language model alone .* reads no images: .* leave the images out"):
        pools(2).run(train_composed, [*argv, seen, "--pp", "2"], str(tmp_path / "refused"))
    assert not (tmp_path / "refused/metrics.jsonl").exists()
    turns = [{"from": "human", "value": ASKED}, {"from": "gpt", "value": "A cat."}]
    (tmp_path / "words.jsonl").write_text(json.dumps({"conversations": turns}))
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": ASKED, "answers": ["A cat."]}))
    run, out = tmp_path / "run", tmp_path / "exported"
    pools(2).run(train_composed, [*argv, str(tmp_path / "words.jsonl"), "--pp", "2"], str(run))
    assert metrics(run)[0]["images"] == 0
    assert from_yaml_file(run / "config.yaml").optimizer.vision_lr is None
    assert convert.main(["export", str(run), str(out)]) == 0
    assert type(transformers.AutoModelForCausalLM.from_pretrained(out)) is transformers.Qwen3ForCausalLM
    options = ["--max-new-tokens", "6", "--device", "cpu"]
    assert chat.main([str(out), "--prompt", ASKED, *options]) == 0
    task = ["--task", str(tmp_path / "questions.jsonl"), "--out", str(tmp_path / "scores")]
    assert evaluate.main([str(out), *task, *options]) == 0
    capsys.readouterr()
    assert chat.main([str(out), "--image", str(tmp_path / "0.png"), "--prompt", ASKED, *options]) == 2
    assert "reads no images" in capsys.readouterr().err


KINDS = [name for name, each in registered("connectors").items() if isinstance(each, Connector) and name != "mlp"]


@pytest.mark.parametrize("kind", fast_and_slow(["linear"], KINDS))
def test_every_other_connector_answers_by_megavlms_own_model(pools, kind, tmp_path, capsys):
    flags = f"--projector-kind {kind} {MODELS.get(kind.replace('_', '-'), '')}"
    argv = [*begun(tmp_path, "clip", "qwen2"), *flags.split()]
    pools(1).run(train_composed, argv, str(run := tmp_path / "run"))
    out = tmp_path / "exported"
    assert convert.main(["export", str(run), str(out)]) == 0
    answers = set()
    question = ["--image", str(tmp_path / "0.png"), "--prompt", ASKED, "--max-new-tokens", "6", "--device", "cpu"]
    capsys.readouterr()
    for folder in (run, out):
        assert chat.main([str(folder), *question]) == 0
        answers.add(answer := capsys.readouterr().out.rstrip("\n"))
        scores = tmp_path / f"scores-{folder.name}"
        task = ["--task", str(tmp_path / "questions.jsonl"), "--out", str(scores), *question[4:]]
        assert evaluate.main([str(folder), *task]) == 0
        results = json.loads((scores / "results.json").read_text())
        assert [each["answer"] for each in results["tasks"]["questions"]["answers"]] == [answer]
        capsys.readouterr()
    assert len(answers) == 1
    assert compare.main([str(run), str(out)]) == 0
    assert chat.main([str(out), *question, "--temperature", "5"]) == 0
