"""Scores of tokens: those of Transformers, at any layout the same, continued after an interruption, and distilled."""

from __future__ import annotations

import json
import os
import runpy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from megavlm.command_line.configuration import to_train
from megavlm.config.schema import DataConfig, DatasetConfig, ModelConfig
from megavlm.data.records import open_records
from megavlm.data.types import Conversation, EncodedSample, Sample
from megavlm.inference.folders import ModelFolder
from megavlm.inference.model import TrainedModel
from megavlm.inputs.batch import MicroBatch
from megavlm.parallel.groups import destroy_groups
from megavlm.programs import logprobs
from megavlm.programs.logprobs import _row, _run_words, _write_rows
from megavlm.rules.load import from_yaml_file
from megavlm.train.token_scores import scored_batches
from tests.support import hf
from tests.support.covering import slow
from tests.support.data_files import (
    sources_of,
    write_all,
    write_held_out,
    write_preferences,
    write_tokenizer,
)
from tests.support.processors import picture
from tests.support.tiny_models import tiny
from tests.support.training import LEAN, assert_same_curve, metrics, started, train, train_composed
from tests.support.whole_models import whole_folder

ROOT = Path(__file__).parents[2]
NAMES = ("positions", "tokens", "logprobs", "entropies", "top_tokens", "top_logprobs")


def write(words: Sequence[str], files: int | None = None) -> None:
    """Run the program; it is interrupted after so many files."""

    class Interrupted(Exception):
        pass

    written, write_rows = [], logprobs._write_rows

    def interrupted(path: Path, rows: Any) -> None:
        if len(written) == files:
            raise Interrupted
        written.append(path)
        write_rows(path, rows)

    destroy_groups()
    met = patch.dict(os.environ, MASTER_ADDR="localhost", MASTER_PORT="1")  # the pool's processes have met already
    with met, patch.object(logprobs, "_ROWS", 2), patch.object(logprobs, "_write_rows", interrupted):
        try:
            assert logprobs.main(words) == 0
        except Interrupted:
            assert files is not None


def model_of(folder: Path) -> TrainedModel:
    return TrainedModel.of(folder, DataConfig(), device=torch.device("cpu"), dtype="float32", said=ModelConfig())


def batch_of(model: TrainedModel, read: Conversation) -> tuple[EncodedSample, MicroBatch]:
    (encoded,) = model.source.encoded(read, source=0)[0]
    images = tuple(model.source.visuals.load(read.images, image) for image in encoded.images)
    return encoded, model.batch([Sample(encoded.tokens, encoded.trained, images, encoded.tile_groups)])


def inputs_of(model: TrainedModel, batch: MicroBatch) -> dict[str, Any]:
    """Return the arguments of Transformers' model for a micro-batch."""
    return {**model.inputs(batch, torch.ones_like(batch.text.tokens)), "use_cache": False}


def expected_of(folder: Path, data: str) -> dict[tuple[str, int], list[np.ndarray]]:
    """Return tokens, log-probabilities, entropies and likeliest tokens by Transformers of each record, unpacked."""
    model, records = model_of(folder), open_records(DatasetConfig(path=data))
    found = {}
    for number in range(len(records)):
        encoded, batch = batch_of(model, records.read(number))
        with torch.no_grad():
            if model.is_own:
                logits = model.module(batch, logits=True)
            else:
                logits = model.module(**inputs_of(model, batch)).logits
        logprobs = torch.log_softmax(logits[0].double(), -1)
        places = torch.nonzero(torch.from_numpy(encoded.trained)).flatten()
        rows, tokens = logprobs[places - 1], torch.from_numpy(encoded.tokens)[places]
        top = rows.topk(3)
        one = rows.gather(1, tokens[:, None])[:, 0]
        each = (places, tokens, one, -(rows.exp() * rows).sum(1), top.indices, top.values)
        found[records.label(number)] = [value.numpy() for value in each]
    return found


TALKS: list[tuple[dict[str, Any], list[str]]] = [  # what is shown, questions and answers in turn
    ({"image": "0.png"}, ["<image>\nWhich is the largest?", "A cat and a dog."]),
    ({}, ["How many?", "A cat.", "Which is the largest?", "The dog."]),
    ({"image": ["1.png", "0.png"]}, ["<image>\n<image>\nWhich?", "The largest is the cat."]),
    ({"image": "1.png"}, ["<image>\nHow many?", "A cat and a dog."]),
    ({"video": "clip"}, ["<video>\nHow many?", "A dog and a cat."]),
    ({}, ["Which is the largest?", "A cat and a dog."]),
]


def write_talks(folder: Path, shows: Sequence[str]) -> str:
    """Write six records with what is among `shows`, and their images; of a video the frames."""
    (folder / "clip").mkdir(parents=True)
    for number, size in enumerate([(60, 90), (97, 53)]):
        Image.fromarray(picture(*size, seed=number)).save(folder / f"{number}.png")
    for number in range(4):
        Image.fromarray(picture(60, 90, seed=number)).save(folder / f"clip/{number}.png")
    lines = [
        {**shown, "conversations": [{"from": ("human", "gpt")[at % 2], "value": text} for at, text in enumerate(said)]}
        for shown, said in TALKS
        if set(shown) <= {*shows}
    ]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, (3 * lines)[:6])))
    return str(folder / "data.jsonl")


def folder_of(name: str, root: Path) -> Path:
    """Write a model with its tokenizer and processor; of a language model alone, with a tokenizer of words."""
    if not name.startswith("text"):
        return whole_folder(name, root)[0]
    folder = hf.save(tiny(name), root / "hf")
    (folder / "chat_template.jinja").unlink()
    return write_tokenizer(folder)


def rows_of(out: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    return [row for file in sorted(out.glob("part-*.parquet")) for row in pq.read_table(file).to_pylist()]


SEEN = ("image", "video")
FULL, LORA = "--lr 1e-2", "--lr 1e-2 --lora-rank 2 --lora-alpha 8 --lora-targets language vision"
IN_PARTS = "--projector-kind qformer"


@pytest.mark.parametrize(
    ("name", "shows", "world", "layout", "trained"),
    [
        ("qwen3.5", SEEN, 1, "", ""),
        slow("qwen3-vl", SEEN, 4, "--tp 2 --pp 2 --vpp 2", LORA),
        slow("qwen2.5-vl", SEEN, 2, "--tp 2", ""),
        slow("internvl", SEEN, 2, "--pp 2", LORA),
        slow("gemma3", ("image",), 2, "--cp 2", ""),
        slow("gemma4", SEEN, 2, "--tp 2", FULL),
        slow("qwen3.5", SEEN, 2, "--cp 2", ""),
        slow("qwen3.5-moe", SEEN, 2, "--tp 2 --ep 2", ""),
        slow("qwen3-vl-moe", SEEN, 2, "--ep 2", LORA.replace("language vision", "experts language")),
        slow("glm4v-moe", SEEN, 4, "--tp 2 --ep 2 --etp 2", ""),
        slow("onevision", SEEN, 2, "--data-parallel-sharding full", ""),
        slow("minicpmv-4.7", SEEN, 2, "--pp 2 --placement colocated", ""),
        slow("llava", ("image",), 2, "--tp 2", IN_PARTS),
        slow("text-llama", (), 2, "--tp 2", FULL),
    ],
)
def test_scores_are_those_of_transformers(pools, tmp_path, name, shows, world, layout, trained):
    """The first files are one process's, the rest those of others, which continue; sequences are packed. A run that was
    trained is scored as its export, adapters merged; where Transformers has no such model, as on one process.
    """
    given, data = folder_of(name, tmp_path), write_talks(tmp_path / "data", shows)
    options = "--precision fp32 --seq-length 512 --global-batch-size 2 --packing-window 2 --num-workers 0".split()
    model = given
    if trained:
        begun = ["--init-from", str(given)]
        if trained == IN_PARTS:
            begun = [word for part in ("vision", "language") for word in (f"--{part}-from", str(given))]
        argv = [*begun, "--datasets", data, *options, *trained.split()]
        model = tmp_path / "run"
        pools(1).run(train_composed, [*argv, *"--train-iters 2 --lr-warmup-iters 0".split()], str(model))
    words = [str(model), data, "--out", str(tmp_path / "out"), "--entropy", "--top-k", "3", *options]
    pools(1).run(write, words, 1)
    state = json.loads((tmp_path / "out/position.json").read_text())
    assert (state["files"], state["last"]) == (1, False)
    pools(world).run(write, [*words, *layout.split()])
    rows = rows_of(tmp_path / "out")
    expected = expected_of(model / "exports/iter_0000002" if trained else model, data)
    assert len(list((tmp_path / "out").glob("part-*"))) > 1
    assert sorted(row["record"] for row in rows) == sorted(expected)
    for row in rows:
        for field, theirs in zip(NAMES, expected[row["record"]], strict=True):
            exact = np.issubdtype(theirs.dtype, np.integer)
            np.testing.assert_allclose(row[field], theirs, rtol=0, atol=0 if exact else 1e-4, err_msg=field)
    if trained in (FULL, LORA):
        before = expected_of(given, data)
        assert max(np.abs(expected[each][2] - before[each][2]).max() for each in expected) > 1e-3, "it has learned"
    with pytest.raises(AssertionError):
        pools(1).run(write, [*words, "--top-k", "2"])


def test_scores_of_a_reward_model_are_those_of_transformers(pools, tmp_path):
    """Pairs with images and single answers have their last hidden states times `score.weight`; pairs are ranked."""
    plain, folder, images = tmp_path / "plain", tmp_path / "reward", tmp_path / "images"
    runpy.run_path(str(ROOT / "examples/first_run/small_model.py"))["main"](plain)
    shutil.copytree(plain, folder)
    weight = torch.randn(1, 128)
    save_file({**load_file(plain / "model.safetensors"), "score.weight": weight}, folder / "model.safetensors")
    pairs = write_preferences(tmp_path, records=9)
    files = [pairs, write_preferences(tmp_path, records=5, seed=4, name="rated.jsonl", rated=True)]
    data = [f"{path},image_root={images}" for path in files]
    words = [str(folder), *data, "--out", str(tmp_path / "out")]
    words += "--precision fp32 --seq-length 256 --global-batch-size 2 --num-workers 0".split()
    pools(1).run(write, words, 2)
    pools(2).run(write, [*words, "--tp", "2"])
    rows = rows_of(tmp_path / "out")
    found = {(row["data_set"], row["record"]): (row["score"], row["rejected_score"]) for row in rows}
    model, margins = model_of(plain), []
    for path in files:
        records = open_records(DatasetConfig(path=str(path), image_root=str(images)), answers=True)
        for number in range(len(records)):
            expected = []
            for one in records.read(number).conversations():
                with torch.no_grad():
                    inputs = inputs_of(model, batch_of(model, one)[1])
                    states = model.module.base_model(**inputs).last_hidden_state
                expected.append(float(states[0, -1] @ weight[0]))
            if (scores := found.pop((path.stem, records.label(number)), None)) is not None:  # it is not too long
                margins += [scores[0] - scores[1]] if len(expected) == 2 else []
                assert scores == pytest.approx([*expected, np.nan][:2], abs=1e-4, nan_ok=True)
    state = json.loads((tmp_path / "out/position.json").read_text())
    assert not found
    assert len(margins) > 4
    assert state["samples"] > len(margins) + 2
    assert state["margins"] == pytest.approx(sum(margins))
    right, mean = sum(margin > 0 for margin in margins) / len(margins), sum(margins) / len(margins)
    assert logprobs._ranking(state) == f"; {right:.1%} of {len(margins)} pairs right, mean margin {mean:.3f}"
    with pytest.raises(AssertionError):
        pools(1).run(write, [*words, "--top-k", "2"])


@pytest.mark.parametrize("most_images", [0, slow(2)])
def test_a_reward_model_from_random_weights_ranks_as_its_validation(pools, tmp_path, most_images):
    """A language model alone, or a vision-language model."""
    path = write_preferences(tmp_path, records=9, most_images=most_images)
    data = f"{path},image_root={tmp_path / 'images'}"
    files = ["--datasets", data, "--validation", data, "--tokenizer", str(write_tokenizer(tmp_path / "tokenizer"))]
    argv = [*LEAN, *files, *"--objective reward --images-per-sample 1 --image-sizes --seq-length 112".split()]
    argv += [] if most_images else ["--set", "model.vision.num_layers=0"]
    pools(1).run(train, [*argv, *"--num-workers 0 --train-iters 2".split()], str(tmp_path / "run"))
    pools(1).run(write, [str(tmp_path / "run"), data, "--out", str(tmp_path / "out"), "--num-workers", "0"])
    state, last = json.loads((tmp_path / "out/position.json").read_text()), metrics(tmp_path / "run")[-1]
    assert from_yaml_file(tmp_path / "out/run/config.yaml").model.objective.kind == "reward"
    assert state["pairs"] > 4
    assert state["right"] / state["pairs"] == pytest.approx(last["validation/reward_accuracy"])
    assert state["margins"] / state["pairs"] == pytest.approx(last["validation/reward_margin"], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("text-llama", "--lora-rank 1"),
        ("llava", "--freeze vision language"),
        ("omni", "--freeze vision audio language"),
    ],
)
def test_little_is_trained_while_scores_are_computed(name: str, trained: str, tmp_path: Path) -> None:
    folder = hf.save(tiny(name), tmp_path / "hf")
    write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "data.jsonl").write_text('{"messages": [{"role": "user", "content": "?"}]}\n')
    more = ["--tokenizer", str(tmp_path / "tokenizer")]
    found = ModelFolder(folder, DataConfig(video_max_tokens=50), "", tmp_path)  # of which a model of text has no use
    words = _run_words(found, [str(tmp_path / "data.jsonl")], tmp_path / "out", more)
    assert trained in " ".join(words)
    to_train(words, launched=1)  # it is not refused


def scores(argv: Sequence[str], run_dir: str) -> dict[str, list[Any]]:
    """Return the scores by record, on rank 0."""
    with started(argv, run_dir) as run:
        batches = list(scored_batches(run, top=3))
        found: dict[str, list[Any]] = {}
        for data_set, record, each in (sample for batch in batches for sample in batch.samples):
            found.setdefault(f"{data_set}/{record}", []).append([getattr(each, name) for name in NAMES])
    return found


@pytest.mark.parametrize(
    ("world", "layout", "model"),
    [
        slow(2, "--cp 2", "--set model.language.num_attention_heads=3 model.language.num_query_groups=3"),
        slow(4, "--tp 2 --pp 2 --vpp 2 --mbs 2", ""),
        slow(4, "--pp 2 --placement colocated", "--lora-rank 4"),
        slow(2, "--data-parallel-sharding full --num-workers 1", ""),
        slow(4, "--tp 2 --cp 2", "--set model.language.mtp_layers=1 model.language.final_softcap=5"),
    ],
)
def test_any_layout_scores_the_same(pools, tmp_path, world, layout, model):
    folder = write_held_out(tmp_path / "files", samples=9, lines=5)
    held = folder / "held"
    files = ["--validation", f"{held / 'chat.jsonl'},image_root={held / 'images'}", f"{held / 'book.txt'},name=text"]
    argv = [*LEAN, *sources_of(folder), *files, *model.split()]
    argv += (
        "--images-per-sample 1 --image-sizes --seq-length 96 --global-batch-size 8 --num-workers 0 --no-save".split()
    )
    (theirs,) = pools(1).run(scores, argv, str(tmp_path / "one"))
    ours = pools(world).run(scores, [*argv, *layout.split()], str(tmp_path / "other"))[0]
    assert len(theirs) > 9
    assert ours.keys() == theirs.keys()
    for record, pieces in theirs.items():
        for mine, piece in zip(ours[record], pieces, strict=True):
            for name, own, other in zip(NAMES, mine, piece, strict=True):
                np.testing.assert_allclose(own, other, rtol=1e-5, atol=0, err_msg=f"{name} of {record}")


@pytest.mark.parametrize(
    ("world", "layout", "model"),
    [
        (1, "", "--lora-rank 4"),
        slow(2, "--tp 2", ""),
        slow(2, "--data-parallel-sharding full", ""),
        slow(4, "--tp 2 --pp 2 --placement colocated", "--set model.language.tie_embeddings=true"),
    ],
)
def test_a_run_from_random_weights_is_scored_by_its_checkpoint(pools, tmp_path, world, layout, model):
    """As by the run itself, resumed; with its tokenizer, sequence length and which tokens are trained."""
    folder = write_held_out(tmp_path / "files", samples=9, lines=5)
    held = [f"{folder / 'held/chat.jsonl'},image_root={folder / 'held/images'}", f"{folder / 'held/book.txt'}"]
    argv = [*LEAN, *sources_of(folder), "--validation", *held, *model.split()]
    argv += "--images-per-sample 1 --image-sizes --seq-length 96 --train-on last --lr 1e-2 --train-iters 2".split()
    run, out = tmp_path / "run", tmp_path / "out"
    pools(1).run(train, argv, str(run))
    (expected,) = pools(1).run(scores, argv, str(run))
    pools(world).run(write, [str(run), *held, "--out", str(out), "--entropy", "--top-k", "3", *layout.split()])
    found: dict[str, list[Any]] = {}
    for row in rows_of(out):
        found.setdefault(f"{row['data_set']}/{row['record']}", []).append([row[name] for name in NAMES])
    assert found.keys() == expected.keys()
    assert not (run / "exports").exists()
    for record, pieces in expected.items():
        for mine, piece in zip(found[record], pieces, strict=True):
            for name, own, other in zip(NAMES, mine, piece, strict=True):
                np.testing.assert_allclose(own, other, rtol=1e-5, atol=0, err_msg=f"{name} of {record}")


def write_teacher(argv: Sequence[str], folder: str, top: int) -> float:
    """Write the scores of a run's first weights as a command does, and return the mean entropy of a token."""
    with started(argv, f"{folder}-run") as run:
        samples = [sample for batch in scored_batches(run, top=top) for sample in batch.samples]
    Path(folder).mkdir()
    for first in range(0, len(samples), 30):  # files of two groups
        rows = [_row(*sample, {"entropy": False, "top_k": top}) for sample in samples[first : first + 30]]
        _write_rows(Path(folder) / f"part-{first:05}.parquet", rows)
    return float(np.concatenate([scores.entropies for *_, scores in samples]).mean())


@pytest.fixture(scope="module")
def lessons(pools, tmp_path_factory) -> Any:
    """Return the arguments of a run and its records under two teachers: all tokens of itself, five of another model."""
    folder = write_all(tmp_path_factory.mktemp("distillation"), samples=20)
    files, pool = sources_of(folder), pools(1)
    argv = [*LEAN, *files, *"--images-per-sample 1 --image-sizes --seq-length 40 --global-batch-size 8".split()]
    argv += "--num-workers 0 --no-save --train-iters 3".split()
    scored = [*argv, "--validation", files[1].removesuffix(",weight=3"), files[2]]
    (entropy,) = pool.run(write_teacher, scored, str(folder / "own"), 97)
    pool.run(write_teacher, [*scored, "--seed", "9"], str(folder / "other"), 5)
    return argv, folder, entropy


def test_a_model_has_nothing_to_learn_from_itself(pools, lessons, tmp_path):
    argv, folder, entropy = lessons
    pools(1).run(train, [*argv, "--set", f"data.teacher={folder / 'own'}"], str(tmp_path))
    first = metrics(tmp_path)[0]
    assert first["loss"] == pytest.approx(entropy, rel=0.02)
    assert first["grad_norm"] < 1e-5


@pytest.mark.parametrize(
    ("world", "layout", "model"),
    [
        (2, "--tp 2 --micro-batch-size 2", ""),
        slow(4, "--tp 2 --pp 2 --vpp 2", "--set model.language.final_softcap=5"),
        slow(2, "--cp 2", "--set model.language.mtp_layers=1"),
        slow(4, "--pp 2 --cp 2 --placement colocated", "--set execution.loss_chunk_tokens=16"),
    ],
)
def test_any_layout_learns_the_same_from_a_teacher(pools, lessons, tmp_path, world, layout, model):
    argv, folder, _ = lessons
    argv = [*argv, "--set", f"data.teacher={folder / 'other'}", "data.teacher_weight=0.7", *model.split()]
    pools(1).run(train, argv, str(tmp_path / "one"))
    pools(world).run(train, [*argv, *layout.split()], str(tmp_path / "other"))
    assert_same_curve(metrics(tmp_path / "other"), metrics(tmp_path / "one"))


def test_a_record_without_scores_ends_the_run(pools, lessons, tmp_path):
    argv, folder, _ = lessons
    argv = [*argv, "--set", f"data.teacher={folder / 'other'}"]
    with pytest.raises(AssertionError, match=r"has other tokens for .* of train.*--seq-length"):
        pools(1).run(train, [*argv, "--train-on", "all"], str(tmp_path / "others"))
    named = [word.replace("weight=3", "name=more") for word in argv]
    with pytest.raises(AssertionError, match=r"has no scores for train\.jsonl:.* of more"):
        pools(1).run(train, named, str(tmp_path / "more"))
