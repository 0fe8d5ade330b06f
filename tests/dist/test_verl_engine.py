"""The engine of `examples/verl_engine`: GRPO with a stand-in for rollouts, and the contract that verl publishes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from megavlm.errors import UserError
from tests.support import extensions, hf, verl_stand_in
from tests.support.covering import slow
from tests.support.pool import Pools
from tests.support.tiny_models import FAMILIES

extensions.install()
verl_stand_in.install()

WIDTH = 54  # of four sequences, the first and the last share a row, and so do the others
FLAGS = f"--precision fp32 --seq-length {WIDTH} --global-batch-size 4"
STEPS, ANSWERS, LONGEST = 3, 2, 6  # updates, answers to a prompt, tokens of an answer


@contextmanager
def started(folder: str, run_dir: str, flags: str) -> Iterator[Any]:
    """Give an engine, initialized, on this process's world."""
    from megavlm.parallel.groups import destroy_groups
    from megavlm.train.loop import close

    destroy_groups()
    from verl.workers.engine import EngineRegistry
    from verl_engine.engine import MegavlmEngineConfig

    options = MegavlmEngineConfig(flags=f"{flags} --run-dir {run_dir}")
    optimizer = SimpleNamespace(lr=1e-3, weight_decay=0.01, clip_grad=0.1, betas=(0.9, 0.95), lr_warmup_steps=-1)
    kind = EngineRegistry.get_engine_cls("language_model", options.strategy)
    engine = kind(SimpleNamespace(local_path=folder), options, optimizer, None)
    engine.initialize()
    yield engine
    close(engine.run)
    extensions.forget()


def rollouts(engine: Any, family: str, step: int, *, together: int = 2) -> Any:
    """Return answers drawn at random to this replica's share of the prompts, their advantages, and the policy's
    log-probabilities, a little off: in verl's form.
    """
    from verl.utils import tensordict_utils as tu

    from megavlm.checkpoint.hf.hf_files import HfFolder
    from megavlm.families import family_of
    from megavlm.parallel.rendezvous import of_all_ranks

    config, rng = engine.run.config, np.random.default_rng(step)
    prompts = hf.samples_of(config, FAMILIES[family][1][0], seed=step)
    inputs = family_of(HfFolder(Path(config.checkpoint.init_from)).settings).inputs
    tokens, responses, seen, advantages = [], [], [], []
    for prompt in prompts:
        given = inputs(hf.batch_of_rows(config, [[prompt]]), config.model)
        pixels = {name: value for name, value in given.items() if name in ("pixel_values", "image_grid_thw")}
        rewards = rng.standard_normal(ANSWERS)
        for number in range(ANSWERS):
            answer = rng.integers(1, 50, LONGEST - 2 * number)
            tokens.append(torch.from_numpy(np.concatenate([prompt.tokens[:-LONGEST], answer])))
            responses.append(torch.from_numpy(answer))
            seen.append(pixels)
            advantages.append((rewards[number] - rewards.mean()) / rewards.std())
    off = torch.from_numpy(rng.uniform(-0.4, 0.4, (len(tokens), LONGEST))).float()
    mask = torch.stack([torch.arange(LONGEST) < len(each) for each in responses]).long()
    prompted = [len(each) - len(own) for each, own in zip(tokens, responses, strict=True)]
    before = torch.stack([torch.arange(WIDTH) >= WIDTH - n for n in prompted])
    mine = slice(engine.at.dp * len(tokens) // engine.dims.dp, (engine.at.dp + 1) * len(tokens) // engine.dims.dp)
    data = tu.get_tensordict(
        {
            "input_ids": torch.nested.as_nested_tensor(tokens[mine], layout=torch.jagged),
            "attention_mask": torch.cat([before.long(), mask], dim=1)[mine],
            "response_mask": mask[mine],
            "loss_mask": mask[mine],
            "advantages": torch.tensor(advantages)[mine, None].float().expand(-1, LONGEST).contiguous(),
            "multi_modal_inputs": seen[mine],
        },
        {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": together, "calculate_entropy": True},
    )
    with engine.eval_mode():
        found = engine.infer_batch(data)
    own = None
    if engine.is_mp_src_rank_with_outputs():
        assert (found["model_output"]["entropy"].values() > -1e-6).all()
        own = [each.clone() for each in found["model_output"]["log_probs"].unbind()]
    (known,) = [each for dp, each in of_all_ranks((engine.at.dp, own)) if dp == engine.at.dp and each is not None]
    data["old_log_probs"] = answers_of(known, data) + off[mine]
    tu.assign_non_tensor(data, calculate_entropy=False)
    return data


def answers_of(values: Sequence[Tensor], data: Any) -> Tensor:
    """Return [n, LONGEST] of sequences' values that predict the tokens of answers, as verl cuts them."""
    lengths = data["response_mask"].sum(1).tolist()
    cut = [each[len(each) - n - 1 : -1] for each, n in zip(values, lengths, strict=True)]
    return torch.stack([torch.nn.functional.pad(each, (0, LONGEST - len(each))) for each in cut])


def grpo(*, model_output: dict[str, Tensor], data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, float]]:
    """Return GRPO's clipped loss, a mean over all answers' tokens (`loss_agg_mode=token-mean`)."""
    ratio = (answers_of(model_output["log_probs"].unbind(), data) - data["old_log_probs"]).exp()
    gains = torch.minimum(ratio * data["advantages"], ratio.clamp(0.8, 1.2) * data["advantages"])
    loss = -(gains * data["response_mask"]).sum() / data["batch_num_tokens"] * data["dp_size"]
    return loss, {"clipped": float((ratio / ratio.clamp(0.8, 1.2) - 1).abs().sum().detach())}


def trained(folder: str, run_dir: str, flags: str, family: str) -> tuple[list[Any], dict[str, Tensor]]:
    """Run training steps; return losses, gradient norms, sums of log-probabilities of all replicas, and the weights."""
    from megavlm.parallel.rendezvous import of_all_ranks

    steps = []
    with started(folder, run_dir, flags) as engine:
        for step in range(STEPS):
            data = rollouts(engine, family, step)
            with engine.train_mode():
                output = engine.train_batch(data, grpo)
            rate = engine.lr_scheduler_step()
            assert rate == pytest.approx(1e-3)
            has = engine.is_mp_src_rank_with_outputs()
            told = of_all_ranks((sum(output["loss"]), output["metrics"], data["old_log_probs"].sum()) if has else None)
            found = [each for each in told if each is not None]
            assert len(found) == engine.get_data_parallel_size() == engine.get_data_parallel_group().size()
            losses, measures, logs = zip(*found, strict=True)
            (norm,) = {metrics["grad_norm"] for metrics in measures}
            assert any(sum(metrics["clipped"]) > 0 for metrics in measures)
            steps.append((sum(losses) / len(losses), norm, float(sum(logs))))
            if step == 0:
                kept = str(Path(run_dir) / "kept/actor")
                engine.save_checkpoint(kept, global_step=1, max_ckpt_to_keep=1)
                first = dict(engine.get_per_tensor_param()[0])
        last = dict(engine.get_per_tensor_param()[0])
        engine.load_checkpoint(kept)
        again = dict(engine.get_per_tensor_param()[0])
    assert all(torch.equal(first[name], again[name]) for name in first)
    return steps, last


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: hf.save(FAMILIES[name][0](), tmp_path_factory.mktemp(name) / "hf") for name in ("qwen3-vl", "llava")}


def gradients(folder: str, run_dir: str, family: str) -> tuple[float, float, float]:
    """Return how far log-probabilities are from those of Transformers, and loss and gradients of a step from those of
    whole logits of one sequence after the other.
    """
    from verl_engine.rollouts import samples_of

    from megavlm.data.collate import CollateSpec, collate

    theirs = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    with started(folder, run_dir, f"{FLAGS} --data-parallel-sharding none") as engine:
        data = rollouts(engine, family, 0, together=4)
        for more, words in (
            ({"temperature": 0.7}, "sample at temperature 1"),
            ({"calculate_entropy": True}, "entropy_coeff to 0"),
            ({"multi_modal_inputs": [{"pixel_values_videos": 0}] * len(data["loss_mask"])}, "does not read"),
        ):
            with pytest.raises(UserError, match=words):
                engine.forward_backward_batch(type(data)({**data, **more}), grpo)
        with engine.train_mode():
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(data, grpo)
            with pytest.raises(UserError, match="several batches"):
                engine.forward_backward_batch(data, grpo)
            (chunk,) = engine.run.engine.chunks
            ours = {name: param.main_grad.clone() for name, param in chunk.named_parameters()}
            chunk.zero_grad_buffer()
            model, spec = engine.run.config.model, CollateSpec.of(engine.run.config, engine.run.source)
            images, sequences, apart = data["multi_modal_inputs"], [], 0.0
            samples, known = samples_of(data, images, model), output["model_output"]["log_probs"].unbind()
            for sample, given, own in zip(samples, images, known, strict=True):
                tokens = torch.from_numpy(sample.tokens)[None]
                logits = chunk(collate([[sample]], spec), logits=True)[:, : len(sample)].float()
                picked = logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None]).flatten()
                sequences.append(torch.cat([picked, picked.new_zeros(1)]))
                kinds = {"mm_token_type_ids": tokens.eq(model.image_token).int()} if "image_grid_thw" in given else {}
                with torch.no_grad():
                    other = theirs(input_ids=tokens, **given, **kinds).logits[:, :-1].log_softmax(-1)
                other = other.gather(2, tokens[:, 1:, None]).flatten()
                n = int(sample.trained.sum())
                apart = max(apart, float((other[-n:] - own[-n - 1 : -1]).abs().max()))
            values = torch.nested.as_nested_tensor(sequences, layout=torch.jagged)
            loss, _ = grpo(model_output={"log_probs": values}, data=data)
            loss.backward()
            off = max(
                float((param.main_grad - ours[name]).abs().max() / ours[name].abs().max().clamp(min=1e-6))
                for name, param in chunk.named_parameters()
            )
    return apart, abs(sum(output["loss"]) / float(loss.detach()) - 1), off


@pytest.mark.parametrize("family", ["qwen3-vl", slow("llava")])
def test_gradients_are_those_of_whole_logits(pools: Pools, folders: Any, tmp_path: Path, family: str) -> None:
    ((apart, loss, off),) = pools(1).run(gradients, str(folders[family]), str(tmp_path), family)
    assert apart < 1e-4
    assert max(loss, off) < 1e-5


LAYOUTS = [
    slow(2, "--tp 2"),
    slow(4, "--tp 2 --pp 2"),
    slow(2, "--pp 2 --vpp 2"),
    slow(2, "--cp 2"),
    slow(2, ""),
    slow(2, "--data-parallel-sharding full"),
    slow(2, "--pp 2 --placement colocated"),
]


def test_three_steps_train_save_and_load(pools: Pools, folders: Any, tmp_path: Path) -> None:
    folder = folders["qwen3-vl"]
    ((steps, weights),) = pools(1).run(trained, str(folder), str(tmp_path), FLAGS, "qwen3-vl")
    assert all(norm > 0 for _, norm, _ in steps)
    given = load_file(folder / "model.safetensors")
    assert weights.keys() == given.keys()
    assert not any(torch.equal(weights[name], given[name]) for name in given if "bias" not in name)


@pytest.mark.parametrize(("world", "flags"), LAYOUTS)
def test_a_layout_trains_as_one_process(pools: Pools, folders: Any, tmp_path: Path, world: int, flags: str) -> None:
    folder = str(folders["qwen3-vl"])
    ((steps, weights),) = pools(1).run(trained, folder, str(tmp_path / "one"), FLAGS, "qwen3-vl")
    many = pools(world).run(trained, folder, str(tmp_path / "many"), f"{FLAGS} {flags}", "qwen3-vl")
    for found, others in many:
        np.testing.assert_allclose(found, steps, rtol=1e-5, atol=1e-6)
        assert [(name, value.shape) for name, value in others.items()] == [(n, v.shape) for n, v in weights.items()]


def test_the_contract_is_kept() -> None:
    """The engine implements each method that verl declares, with its parameters."""
    from verl_engine.engine import MegavlmEngine

    for name, declared in vars(verl_stand_in.BaseEngine).items():
        if name.startswith("__") or name in ("train_batch", "infer_batch"):
            continue
        own = vars(MegavlmEngine)[name]
        if isinstance(declared, property):
            assert isinstance(own, property), name
            continue
        taken = inspect.signature(own).parameters
        for wanted in inspect.signature(declared).parameters.values():
            assert taken[wanted.name].kind == wanted.kind, (name, wanted)
            assert taken[wanted.name].default == wanted.default, (name, wanted)
