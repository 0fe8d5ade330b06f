"""Preferences: pairs and rated answers have the losses of the papers, and at any layout those of one process."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megavlm.checkpoint.hf.pretrained import with_pretrained_model
from megavlm.data.records.shapes import SHAPES, record_of
from megavlm.data.sample_encoder import Encoder
from megavlm.data.types import POSITIVE, ROLE
from megavlm.inputs.bad_sample import BadSample
from megavlm.model.vlm import bare_chunk
from megavlm.programs.chat import main as chat
from megavlm.programs.compare import main as compare
from megavlm.programs.convert import main as convert
from tests.support.covering import fast_and_slow, slow
from tests.support.data_files import write_preferences, write_tokenizer
from tests.support.training import LEAN, assert_resumed, assert_same_curve, metrics, started, train, train_composed

ROOT = Path(__file__).parents[2]

MEASURES = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy", "chosen_share", "answer_tokens")
EXPERTS = "--num-experts 4 --set model.experts.ffn_hidden_size=24"
LOSSES = {
    "dpo": "--objective dpo --set model.objective.label_smoothing=0.1",
    "rpo": "--objective dpo --set model.objective.rpo_alpha=0.5 model.objective.beta=0.4",
    "ipo": "--objective ipo",
    "orpo": "--objective orpo",
    "simpo": "--objective simpo --set model.objective.simpo_gamma=0.3",
    "kto": "--objective kto --set model.objective.desirable_weight=1.3",
    # A pair's loss sees little of what is added to all scores: Adam would move that where rounding decides, but for a
    # larger epsilon.
    "reward": "--objective reward --set model.objective.center_rewards=0.1 optimizer.adam_eps=1e-3",
}


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The command line of each loss; that of KTO has rated answers beside pairs."""
    folder = tmp_path_factory.mktemp("files")
    write_tokenizer(folder / "tokenizer")
    files = [f"{write_preferences(folder, records=30)},image_root={folder / 'images'}"]
    held = f"{write_preferences(folder, records=7, seed=4, name='held.jsonl')},image_root={folder / 'images'}"
    rated = write_preferences(folder, records=30, seed=5, name="rated.jsonl", rated=True)
    argv = [
        *(*LEAN, "--datasets", *files, "--validation", held, "--tokenizer", str(folder / "tokenizer")),
        *"--images-per-sample 1 --image-sizes --seq-length 112 --num-workers 0 --train-iters 3 --lr 1e-2".split(),
        *"--lr-warmup-iters 0 --packing-window 16 --eval-interval 2".split(),
    ]
    more = {"kto": ["--datasets", f"{rated},image_root={folder / 'images'}"]}
    found = {loss: [*argv, *options.split(), *more.get(loss, [])] for loss, options in LOSSES.items()}
    words = {"records": 30, "most_images": 0}  # without images
    texts = {files[0]: write_preferences(folder / "texts", **words), held: write_preferences(folder / "held", **words)}
    return {**found, "reward of texts": [str(texts.get(word, word)) for word in found["reward"]]}


def assert_same(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> None:
    assert_same_curve(ours, theirs)
    for own, other in zip(ours, theirs, strict=True):
        names = [name for name in other if name.removeprefix("validation/") in (*MEASURES, "loss")]
        assert len(names) in (5, 10, 6, 12, 7, 14)  # KTO has a share, too, and a reward head no log-probabilities
        for name in names:
            drifts = len(names) in (5, 10) and name.endswith(("chosen", "rejected")) and own["iteration"] > 1
            assert own[name] == pytest.approx(other[name], rel=1e-4 if drifts else 1e-5, abs=1e-6), name


@pytest.mark.parametrize(
    ("world", "layout", "loss", "model"),
    [
        (2, "--cp 2", "dpo", ""),
        slow(2, "--pp 2 --vpp 2", "ipo", ""),
        slow(4, "--tp 2 --pp 2 --mbs 2", "orpo", ""),
        (2, "--mbs 2", "kto", ""),
        (2, "--tp 2 --mbs 2", "reward", ""),
        slow(4, "--tp 2 --cp 2", "reward", "--freeze vision --lora-rank 4"),
        slow(2, "--pp 2 --vpp 2", "reward", ""),
        slow(2, "--data-parallel-sharding full", "reward", ""),
        slow(2, "--data-parallel-sharding optimizer_gradients", "reward", ""),
        slow(2, "--ep 2", "reward", EXPERTS),
        slow(4, "--pp 2 --placement colocated", "reward", ""),
        slow(4, "--tp 2 --pp 2 --vpp 1 --mbs 2", "reward of texts", "--set model.vision.num_layers=0"),
        slow(4, "--tp 2 --cp 2 --mbs 4", "kto", ""),
        slow(2, "--pp 2 --vpp 2", "kto", ""),
        slow(4, "--pp 2 --placement colocated", "simpo", ""),
        slow(4, "--tp 2 --cp 2", "rpo", "--lora-rank 4 --freeze vision"),
        slow(2, "--data-parallel-sharding full --num-workers 1", "dpo", ""),
        slow(2, "--ep 2 --mbs 2", "dpo", EXPERTS),
    ],
)
def test_any_layout_has_the_numbers_of_one_process(pools, alone, losses, tmp_path, world, layout, loss, model):
    words = [*losses[loss], *model.split()]
    pools(world).run(train, [*words, "--no-save", *layout.split()], str(tmp_path))
    ours, theirs = metrics(tmp_path), alone(words)
    assert_same(ours, theirs)
    assert theirs[0]["trained_tokens"] > 4, "several pairs share a sequence"
    if loss in ("dpo", "kto"):  # at first the model is the reference
        assert theirs[0]["reward_margin"] == pytest.approx(0, abs=1e-5)
        assert abs(theirs[2]["reward_margin"]) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_a_run_goes_on_as_it_would_have(pools, losses, tmp_path, loss):
    """The reference stays that of the first start, also on a new disk."""
    words = [*losses[loss], "--lr-decay-iters", "20"]
    pools(2).run(train, [*words, "--train-iters", "4"], str(tmp_path / "whole"))
    words += ["--checkpoint-dir", f"file://{tmp_path}/store"]
    pools(2).run(train, [*words, "--train-iters", "2"], str(tmp_path / "parts"))
    shutil.rmtree(tmp_path / "parts")
    pools(2).run(train, [*words, "--train-iters", "4"], str(tmp_path / "parts"))
    assert_resumed(metrics(tmp_path / "parts"), metrics(tmp_path / "whole")[2:])
    for lost in ("parts", "store"):
        (tmp_path / lost / "reference.npy").unlink()
    with pytest.raises(AssertionError, match=r"reference\.npy is missing"):
        pools(2).run(train, [*words, "--train-iters", "5"], str(tmp_path / "parts"))


def gradients(argv: list[str], run_dir: str) -> tuple[float, float]:
    """Return how far loss and gradients of a step are from those of whole logits and the papers' formulas, pair by
    pair: relative to the loss, and to the largest gradient of each parameter.
    """
    with started([*argv, "--data-parallel-sharding", "none"], run_dir) as run:
        engine, batches = run.engine, run.data_loader.next_step().batches
        (chunk,) = engine.chunks
        with torch.no_grad():  # so that a reference differs from the model
            for param in chunk.parameters():
                param.add_(0.05 * torch.randn_like(param))
        totals = engine.schedule.train(batches)
        ours = {name: param.main_grad.clone() for name, param in chunk.named_parameters()}
        chunk.zero_grad_buffer()
        expected = 0.0
        if run.config.model.objective.kind == "reward":
            center = run.config.model.objective.center_rewards
            losses = [loss for batch in batches for loss in plain_rewards(chunk, batch, center)]
            sum(losses).backward()
            expected, batches = float(sum(losses)), []
        for batch in batches:
            logprobs = torch.log_softmax(chunk(batch, logits=True).float(), -1)
            text, found = batch.text, []
            for (first, _), length in zip(text.prefixes, text.lengths, strict=True):
                row, start = divmod(first, text.tokens.shape[1])
                places = [t for t in range(start, start + length - 1) if text.loss_mask[row, t]]
                assert places
                found.append(torch.stack([logprobs[row, t, text.tokens[row, t + 1]] for t in places]))
            reference = [0.0] * len(found) if text.reference is None else text.reference.tolist()
            objective = run.config.model.objective
            if objective.kind == "kto":
                good = (text.members[:, ROLE] == POSITIVE).tolist()
                losses = [plain_kto(objective, *answer) for answer in zip(found, reference, good, strict=True)]
            else:
                pairs = range(0, len(found), 2)
                losses = [plain_loss(objective, *found[n : n + 2], *reference[n : n + 2]) for n in pairs]
            if losses:
                sum(losses).backward()
                expected += float(sum(losses))
        off = max(
            float((param.main_grad - ours[name]).abs().max() / ours[name].abs().max().clamp(min=1e-6))
            for name, param in chunk.named_parameters()
        )
    return abs(float(totals[0]) / expected - 1), off


def plain_rewards(chunk: Any, batch: Any, center: float) -> list[Any]:
    """Return the loss of each pair of a micro-batch from its answers' last hidden states, one answer at a time."""
    states: list[Any] = []
    parts, width, scores = bare_chunk(chunk).parts, batch.text.tokens.shape[1], []
    hook = parts["language.norm"].register_forward_hook(lambda part, given, output: states.append(output))
    chunk(batch)
    hook.remove()
    for (first, _), length in zip(batch.text.prefixes, batch.text.lengths, strict=True):
        row, start = divmod(first, width)
        scores.append(states[0][start + length - 1, row] @ parts["output"].head.weight[0])
    pairs = [(*scores[n : n + 2], batch.text.reference[n]) for n in range(0, len(scores), 2)]
    assert {float(margin) for *_, margin in pairs} <= {0.0, 0.5, 1.0}
    log_sigmoid = torch.nn.functional.logsigmoid
    return [center * (good + bad) ** 2 - log_sigmoid(good - bad - margin) for good, bad, margin in pairs]


def plain_loss(options: Any, chosen: Any, rejected: Any, of_chosen: float, of_rejected: float) -> Any:
    """Return the loss of a pair from the log-probabilities of the tokens of its answers, as the papers write it."""
    beta, smoothing = options.beta, options.label_smoothing
    log_sigmoid = torch.nn.functional.logsigmoid
    if options.kind == "orpo":
        p, q = chosen.mean().exp(), rejected.mean().exp()
        loss = -chosen.mean() - beta * log_sigmoid(torch.log(p / (1 - p)) - torch.log(q / (1 - q)))
    elif options.kind == "ipo":
        h = (chosen.sum() - of_chosen) / len(chosen) - (rejected.sum() - of_rejected) / len(rejected)
        loss = (h - 1 / (2 * beta)) ** 2
    else:
        if options.kind == "simpo":
            x = beta * (chosen.mean() - rejected.mean()) - options.simpo_gamma
        else:
            x = beta * ((chosen.sum() - of_chosen) - (rejected.sum() - of_rejected))
        loss = -(1 - smoothing) * log_sigmoid(x) - smoothing * log_sigmoid(-x)
    return loss - options.rpo_alpha * chosen.mean()


def plain_kto(options: Any, logprobs: Any, reference: float, good: bool) -> Any:
    """Return λ − v of an answer, as the paper writes it, whose z₀ is 0."""
    r, z0 = logprobs.double().sum() - reference, 0.0
    if good:
        return options.desirable_weight - options.desirable_weight * (options.beta * (r - z0)).sigmoid()
    return 1 - (options.beta * (z0 - r)).sigmoid()


@pytest.mark.parametrize("loss", fast_and_slow(["dpo", "kto", "reward"], ["rpo", "ipo", "orpo", "simpo"]))
def test_loss_and_gradients_are_the_papers(pools, losses, tmp_path, loss):
    ((of_loss, of_gradients),) = pools(1).run(gradients, losses[loss], str(tmp_path))
    assert of_loss < 1e-5
    assert of_gradients < 1e-5


def scores_of_training(argv: list[str], run_dir: str) -> tuple[list[list[int]], list[float]]:
    """Return the conversations of a run's next step as tokens, and the scores that its pipeline gives them."""
    with started(argv, run_dir, with_pretrained_model) as run:
        batches = run.data_loader.next_step().batches
        texts = [
            batch.text.tokens.flatten()[first : first + length].tolist()
            for batch in batches
            for (first, _), length in zip(batch.text.prefixes, batch.text.lengths, strict=True)
        ]
        with run.engine.evaluation():
            return texts, torch.cat(run.engine.schedule.outputs(batches)).tolist()


@pytest.mark.parametrize("adapted", ["", slow("--lora-rank 4 --freeze vision projector")])
def test_an_export_scores_as_training_does(pools, tmp_path, capsys, adapted):
    """Transformers' hidden states and the head of an export give the scores, and so does a run that begins with it."""
    from transformers import AutoModelForImageTextToText

    model, run_dir, out = tmp_path / "model", tmp_path / "run", tmp_path / "out"
    runpy.run_path(str(ROOT / "examples/first_run/small_model.py"))["main"](model)
    pairs = [{"prompt": f"the {at}", "chosen": "cat " * (1 + at % 3), "rejected": "mat"} for at in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    argv = [
        *f"--init-from {model} --objective reward --datasets {tmp_path / 'pairs.jsonl'} --precision fp32".split(),
        *"--lr 1e-2 --train-iters 2 --global-batch-size 4 --seq-length 256 --num-workers 0 --no-tensorboard".split(),
    ]
    pools(2).run(train_composed, [*argv, *adapted.split(), *"--tp 2".split()], str(run_dir))
    assert convert(["merge-lora" if adapted else "export", str(run_dir), str(out)]) == 0
    if adapted:
        assert convert(["export-lora", str(run_dir), str(tmp_path / "peft")]) == 0
        assert json.loads((tmp_path / "peft/adapter_config.json").read_text())["modules_to_save"] == ["score"]
    else:
        assert convert(["verify", str(out), str(run_dir)]) == 0
    assert compare([str(run_dir), str(out)]) == 2
    assert "name a file of pairs" in capsys.readouterr().err
    assert compare([str(run_dir), str(out), str(tmp_path / "pairs.jsonl")]) == 0
    assert compare([str(run_dir), str(model), str(tmp_path / "pairs.jsonl")]) == 2
    assert f"{run_dir} is a reward model, and {model} is none" in capsys.readouterr().err
    assert chat([str(run_dir), "--prompt", "?"]) == 2
    assert f"{run_dir} is a reward model" in capsys.readouterr().err
    ((texts, ours),) = pools(1).run(scores_of_training, [*argv, *adapted.split(), "--train-iters", "3"], str(run_dir))
    theirs = AutoModelForImageTextToText.from_pretrained(out).model
    weight = next(load_file(file)["score.weight"] for file in out.glob("*.safetensors"))
    with torch.no_grad():
        found = [(theirs(torch.tensor([text])).last_hidden_state[0, -1] @ weight[0]).item() for text in texts]
    assert max(ours) - min(ours) > 1e-2
    assert ours == pytest.approx(found, abs=1e-4)
    again = [str(out) if word == str(model) else word for word in argv]
    ((other, begun),) = pools(1).run(scores_of_training, again, str(tmp_path / "again"))
    score = dict(zip(map(tuple, texts), ours, strict=True))
    shared = [(score[tuple(text)], value) for text, value in zip(other, begun, strict=True) if tuple(text) in score]
    assert shared
    assert [value for _, value in shared] == pytest.approx([value for value, _ in shared], abs=1e-4)


def test_each_format_has_the_same_pairs(tmp_path: Path) -> None:
    """Of every format the answers follow the prompt; a list that is an answer stays a text."""
    assert "preferences" in SHAPES
    user = {"role": "user", "content": "how many ?"}
    good, bad = ({"role": "assistant", "content": each} for each in ("[1, 2]", "three"))
    records = [
        {"prompt": "how many ?", "chosen": "[1, 2]", "rejected": "three"},
        {"prompt": [user], "chosen": [good], "rejected": [bad]},
        {"chosen": [user, good], "rejected": [user, bad]},
        {"messages": [user, good], "rejected_response": "three"},
        {"messages": [user, good], "rejected_messages": [user, bad]},
        {"conversations": [{"from": "human", "value": "how many ?"}], "chosen": good, "rejected": bad},
        {"instruction": "how", "input": "many ?", "chosen": "[1, 2]", "rejected": "three"},
    ]
    read = [record_of(record, "preferences", str, str) for record in records]
    said = [
        [[(turn.role, "".join(turn.parts).replace("\n", " ")) for turn in one.turns] for one in each.conversations()]
        for each in read
    ]
    ask = ("user", "how many ?")
    assert said == [[[ask, ("assistant", "[1, 2]")], [ask, ("assistant", "three")]]] * len(records)
    assert len({each.identities for each in read[:-1]}) == 1
    assert np.unique(read[0].identities).size == 2


def test_each_format_has_the_same_rated_answer() -> None:
    """Pairs count as a good and a bad answer; a wrong record says in one line what is wrong."""
    user, answer = {"role": "user", "content": "how many ?"}, {"role": "assistant", "content": "[1, 2]"}
    turns = [{"from": "human", "value": "how many ?"}, {"from": "gpt", "value": "[1, 2]"}]
    records = [
        {"prompt": "how many ?", "completion": "[1, 2]", "label": True},
        {"prompt": [user], "completion": [answer], "label": 1},
        {"messages": [user, answer], "label": "True"},
        {"conversations": turns, "kto_tag": True},
        {"query": "how many ?", "response": "[1, 2]", "label": False},
        {"instruction": "many ?", "output": "[1, 2]", "history": [["how", "what ?"]], "kto_tag": "0"},
    ]
    read = [record_of(record, "preferences", str, str) for record in records]
    assert [each.answers for each in read] == [(2, 0)] * 4 + [(0, 2), (0, 4)]
    assert {each.identities for each in read[:5]} == {read[0].identities}
    assert [turn.parts for turn in read[5].turns] == [("how",), ("what ?",), ("many ?",), ("[1, 2]",)]
    wrong = {
        "its `label` is 'good', neither true nor false": {**records[0], "label": "good"},
        "its `margin` is 'much', which is no number": {**records[0], "margin": "much"},
        "does not end with an answer": {"messages": [user], "label": True},
        "it has no prompt": {"completion": "yes", "label": True},
        "no field `chosen` or `completion`": {"prompt": "how many ?", "label": True},
    }
    for message, record in wrong.items():
        with pytest.raises(BadSample, match=message) as told:
            record_of(record, "preferences", str, str)
        assert "\n" not in str(told.value)
    with pytest.raises(BadSample, match="one rated answer, which --objective kto reads"):
        Encoder.encoded(SimpleNamespace(rates=False), read[0], source=0)
