"""Exports of composed models are asked by Transformers alone, with the example of README, and by megavlm itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from examples.first_run import ask
from megavlm.arch.connector import Connector
from megavlm.config.registry import registered
from megavlm.config.schema import DataConfig
from megavlm.data.types import Conversation, ImageRef, Turn
from megavlm.families import FAMILIES
from megavlm.inference.assistant import Assistant
from megavlm.programs import convert
from megavlm.programs.evaluation import evaluate
from megavlm.programs.inference import chat
from tests.support import hf, tokenizers
from tests.support.covering import fast_and_slow, slow
from tests.support.flags import MODELS
from tests.support.processors import picture
from tests.support.tiny_models import TEXT, TOWER, tiny
from tests.support.training import train_composed

ASKED = "Which is the largest?"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LANGUAGES = [name for family in FAMILIES if family.parts == ("language",) for name in family.model_types]
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
RUN = "--precision fp32 --train-iters 1 --global-batch-size 1 --seq-length 128 --lr 1e-3 --no-tensorboard".split()


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
    return [*RUN, "--num-workers", "0", *given]


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


KINDS = [name for name, each in registered("connectors").items() if isinstance(each, Connector) and name != "mlp"]


@pytest.mark.parametrize("kind", fast_and_slow(("qformer", "linear"), KINDS))
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
    assert chat.main([str(out), *question, "--temperature", "5"]) == 0
