"""From a Hugging Face folder to vectors: train on pairs, export, and embed with Transformers what training embeds."""

from __future__ import annotations

import json
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F

from megavlm.checkpoint.hf.pretrained import with_pretrained_model
from megavlm.data.collate import CollateSpec, collate
from megavlm.data.records.media import file_below
from megavlm.data.records.turns import text_turn
from megavlm.programs.convert import main as convert
from megavlm.programs.embed import main
from tests.support.covering import slow
from tests.support.data_files import write_pairs
from tests.support.flags import MODELS
from tests.support.training import metrics, started, train_composed

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small LLaVA, pairs to train on, and a run on them with tensor and pipeline parallelism."""
    folder = tmp_path_factory.mktemp("embed")
    runpy.run_path(str(ROOT / "examples/first_run/small_model.py"))["main"](folder / "model")
    write_pairs(folder, records=24)
    return folder


def flags(folder: Path, pooling: str, *, model: str = "--init-from {}") -> list[str]:
    """Options of a run on the folder's model, `{}` in `model`."""
    return [
        *model.replace("{}", str(folder / "model")).split(),
        *f"--objective contrastive --pooling {pooling} --set model.objective.learn_temperature=true".split(),
        *f"--datasets {folder / 'pairs.jsonl'},image_root={folder / 'images'} --precision fp32 --lr 1e-3".split(),
        *"--train-iters 3 --global-batch-size 4 --seq-length 256 --num-workers 0 --no-packing --no-tensorboard".split(),
        *"--query-prefix find: --document-prefix see: --save-interval 0".split(),
    ]


def vectors_of_training(argv: list[str], run_dir: str, records: str, root: str) -> Any:
    """Return what the training pipeline makes of each record's document, from the run's checkpoint."""
    from dataclasses import replace

    with started(argv, run_dir, with_pretrained_model) as run:
        find = partial(file_below, Path(root))
        samples = [
            run.source.embedded(replace(text_turn(json.loads(line), find, find), role="positive"))
            for line in Path(records).read_text().splitlines()
        ]
        spec = CollateSpec.of(run.config, run.source)
        batches = [collate([[sample]], spec) for sample in samples]
        with run.engine.evaluation():
            outputs = run.engine.schedule.outputs(batches)
        return [F.normalize(each[:-1], dim=0).tolist() for each in outputs]  # without the scale


@pytest.mark.parametrize(
    ("pooling", "whole"),
    [slow("last", False), slow("mean", True), slow("chat", True), slow("last --lora-rank 4 --freeze vision", True)],
)
def test_an_export_embeds_as_training_does(pools, folder, tmp_path, pooling, whole, capsys):
    """`whole`: with sentence-transformers, too, whose import takes as long as the rest."""
    argv, run_dir = flags(folder, pooling), tmp_path / "run"
    pools(2).run(train_composed, [*argv, *"--tp 2".split()], str(run_dir))
    assert len(metrics(run_dir)) == 3
    pictures = sorted((folder / "images").iterdir())[:3]
    records = [
        {"text": "a cat", "id": "first"},
        {"image": pictures[0].name},
        {"text": "the <image> and <image> .", "images": [pictures[1].name, pictures[2].name]},
        {"text": "see the red mat under the tree", "image": pictures[0].name},
    ]
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = [str(run_dir), f"{file},image_root={folder / 'images'}", "--batch-size", "3"]
    assert main([*words, "--out", str(tmp_path / "out"), "--device", "cpu"]) == 0
    found = np.load(tmp_path / "out/vectors.npy")
    ids = [json.loads(line) for line in (tmp_path / "out/ids.jsonl").read_text().splitlines()]
    assert ids == ["first", 2, 3, 4]
    (ours,) = pools(1).run(vectors_of_training, argv, str(run_dir), str(file), str(folder / "images"))
    np.testing.assert_allclose(found, np.array(ours), atol=1e-4)
    assert np.abs(found @ found.T - np.eye(4)).max() > 1e-3  # no row is empty
    assert main([*words, "--out", str(tmp_path / "queries"), "--as", "query", "--width", "32"]) == 0
    short = np.load(tmp_path / "queries/vectors.npy")
    assert short.shape == (4, 32)
    np.testing.assert_allclose(np.linalg.norm(short, axis=1), 1, rtol=1e-5)
    export = next((run_dir / "exports").glob("iter_*"))
    if whole:
        check_sentence_transformers(export, records, folder / "images", found, chat=pooling == "chat")
    file.write_text('{"text": "a"}\n{"image": "nowhere.png"}\n')
    capsys.readouterr()
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert f"{file.name}:2: " in told
    assert told.endswith("as FILE,image_root=DIR\n")


# No model of Transformers has such a connector; a LLaVA has the other one, and is composed of its own parts again.
IN_PARTS = f"--vision-from {{}} --language-from {{}} {MODELS['qformer']}"
COMPOSED = "--vision-from {} --language-from {}"


@pytest.mark.slow
@pytest.mark.parametrize("model", [IN_PARTS, COMPOSED], ids=["parts", "composed"])
def test_an_export_of_composed_parts_embeds_as_training_does(pools, folder, tmp_path, model):
    from safetensors.torch import load_file

    argv, run_dir, out = flags(folder, "mean", model=model), tmp_path / "run", tmp_path / "exported"
    argv += "--set model.objective.matryoshka_widths=[32] --temperature 0.2 --set model.vision.feature_layer=-3".split()
    pools(4).run(train_composed, [*argv, *"--tp 2 --pp 2".split()], str(run_dir))
    assert convert(["export", str(run_dir), str(out)]) == 0
    told = json.loads((out / "megavlm_embedding.json").read_text())
    expected = {"pooling": "mean", "query_prefix": "find:", "document_prefix": "see:", "matryoshka_widths": [32]}
    assert expected.items() <= told.items()
    assert 0.1 < told["temperature"] < 0.3
    assert told["temperature"] != 0.2  # it was trained
    # The output layer, which training does not hold, is what it was.
    language = out / "language" if model == IN_PARTS else out
    given, kept = (load_file(each / "model.safetensors") for each in (folder / "model", language))
    (head,) = (name for name in given if name.endswith("lm_head.weight"))
    assert given[head].equal(kept[head])

    picture = sorted((folder / "images").iterdir())[0].name
    file = tmp_path / "records.jsonl"
    file.write_text(f'{{"text": "a cat"}}\n{{"text": "see the red mat", "image": "{picture}"}}\n')
    words = [f"{file},image_root={folder / 'images'}", "--device", "cpu", "--out", str(tmp_path / "out")]
    (ours,) = pools(1).run(vectors_of_training, argv, str(run_dir), str(file), str(folder / "images"))
    for source in (run_dir, out):
        assert main([str(source), *words]) == 0
        np.testing.assert_allclose(np.load(tmp_path / "out/vectors.npy"), np.array(ours), atol=1e-4)


def check_sentence_transformers(
    export: Path, records: list[dict[str, Any]], images: Path, found: Any, *, chat: bool
) -> None:
    """Its vectors of texts, of images and of both are those of `megavlm embed`, also where texts are padded."""
    from PIL import Image
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(export), device="cpu")
    texts = model.encode_document([records[0]["text"], "a text that is longer than a cat"])
    np.testing.assert_allclose(texts[0], found[0], atol=1e-4)
    for record, vector in zip(records[1:], found[1:], strict=True):
        pictures = [Image.open(images / name) for name in record.get("images", [record.get("image")])]
        text = record.get("text", "")
        if chat and "<image>" in text:  # it puts images before the text
            continue
        if not chat:  # as docs/models.md says
            text = f"see:{text if '<image>' in text else f'<image>{text}'}"
        given = {"image": pictures, "text": text}
        np.testing.assert_allclose(model.encode_document([given])[0], vector, atol=1e-4)
    assert not np.allclose(model.encode_query(["a cat"])[0], found[0], atol=1e-3)  # another instruction


def test_a_folder_that_does_not_embed_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    assert main([str(folder / "model"), str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert "train a model that embeds, with --objective contrastive or sigmoid" in capsys.readouterr().err
