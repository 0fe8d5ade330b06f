"""Build the VLM that `cpu_step.py` measures, for both sides: SigLIP ViT, GELU MLP, Llama, fp32."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers_models import OPTIMIZER, text_sizes

from megavlm.backend import Backend
from megavlm.config.schema import (
    Config,
    LanguageConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    VisionConfig,
)
from megavlm.data.collate import CollateSpec, collate
from megavlm.data.types import Sample
from megavlm.inputs.batch import MicroBatch
from megavlm.inputs.patches import Image

VOCABULARY, IMAGE_TOKEN, PAD_TOKEN = 32_000, 31_999, 0
IMAGE_TOKENS, TEXT_TOKENS = 256, 256


def config(*, layers: int, micro_batch: int, global_batch: int, parallel: ParallelConfig | None = None) -> Config:
    """Return a run: ViT layers × 384 (6 heads, 16×16 patches), language layers × 512 (8 heads), 512 tokens."""
    return Config(
        model=ModelConfig(
            vision=VisionConfig(
                num_layers=layers,
                hidden_size=384,
                ffn_hidden_size=1536,
                num_attention_heads=6,
                image_size=224,
                patch_size=14,
                activation="gelu_tanh",
                norm_epsilon=1e-6,
            ),
            language=LanguageConfig(num_layers=layers, hidden_size=512, ffn_hidden_size=1376, num_attention_heads=8),
        ),
        train=TrainConfig(
            seq_length=IMAGE_TOKENS + TEXT_TOKENS, micro_batch_size=micro_batch, global_batch_size=global_batch
        ),
        optimizer=OPTIMIZER,
        parallel=parallel or ParallelConfig(),
    )


@dataclass(frozen=True)
class Times:
    """Seconds of one step of one side. `optimizer` is everything but forward and backward.

    `cpu` is the processor time of all threads, which depends less on other work than the clock.
    """

    step: float
    forward: float
    backward: float
    optimizer: float
    cpu: float
    loss: float
    busy: float = 0.0  # in forward and backward of chunks; of the time between the first and the last of them
    schedule: float = 0.0


class Stopwatch:
    """The seconds of each phase of an engine's steps, by megatron-core's names of its timers."""

    def __init__(self, timers: Any) -> None:
        """`timers` is the schedule's `StepTimers`, which goes on with its own work."""
        self.seconds: dict[str, float] = {}
        self._begin, self._end = timers.begin, timers.end
        timers.begin, timers.end = self._started, self._stopped

    def _started(self, name: str) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) - time.perf_counter()
        self._begin(name)

    def _stopped(self, name: str) -> None:
        self._end(name)
        self.seconds[name] += time.perf_counter()


def micro_batch(options: Config, *, seed: int) -> MicroBatch:
    """Return random images, each followed by random text, all of which is trained."""
    vision, random = options.model.vision, np.random.default_rng(seed)
    samples = []
    for _ in range(options.train.micro_batch_size):
        pixels = random.integers(0, 256, (vision.image_size, vision.image_size, 3), dtype=np.uint8)
        image = Image(vision.image_size, vision.image_size, vision.patch_size, partial(np.asarray, pixels))
        tokens = np.full(options.train.seq_length, IMAGE_TOKEN)
        tokens[IMAGE_TOKENS:] = random.integers(1, IMAGE_TOKEN, TEXT_TOKENS)
        samples.append(Sample(tokens, tokens != IMAGE_TOKEN, (image,)))
    return collate(
        [[sample] for sample in samples],
        CollateSpec(
            seq_length=options.train.seq_length,
            image_token=IMAGE_TOKEN,
            pad_token=PAD_TOKEN,
            projector=options.model.projector,
            patch_dim=vision.in_channels * vision.patch_size**2,
        ),
    )


def our_engine(options: Config, backend: Backend) -> Any:
    """Return an engine for the layout of this process."""
    import torch.distributed as dist

    from megavlm.arch.dims import dims_of
    from megavlm.arch.plan import make_plan
    from megavlm.parallel.groups import build_groups
    from megavlm.parallel.rendezvous import start
    from megavlm.rules.defaults import resolve
    from megavlm.train.build_engine import build_engine

    start(backend, timeout_minutes=5)
    options = resolve(options, vocab_size=VOCABULARY)
    plan = make_plan(options, dims_of(options, world=dist.get_world_size()))
    groups = build_groups(plan.dims, tied_owners=(), seed=options.train.seed, timeout_minutes=5)
    return build_engine(options, plan, groups, vocab_size=VOCABULARY, backend=backend)


def our_step(engine: Any, batches: list[MicroBatch]) -> Callable[[], Times]:
    """Return a function that runs and times one megavlm step with megatron-core's timers."""
    watch = Stopwatch(engine.schedule.timers)

    def step() -> Times:
        watch.seconds.clear()
        cpu, start = time.process_time(), time.perf_counter()
        result = engine.train_step(batches)
        total, cpu = time.perf_counter() - start, time.process_time() - cpu
        forward, backward = watch.seconds["forward-compute"], watch.seconds["backward-compute"]
        return Times(
            step=total,
            forward=forward,
            backward=backward,
            optimizer=total - forward - backward,
            cpu=cpu,
            loss=result.loss,
            busy=forward + backward,
            schedule=watch.seconds["forward-backward"],
        )

    return step


def their_model(options: Config) -> Any:
    """Return the same architecture from Transformers."""
    import transformers

    vision, language = options.model.vision, options.model.language
    tower = transformers.SiglipVisionConfig(
        hidden_size=vision.hidden_size,
        intermediate_size=vision.ffn_hidden_size,
        num_hidden_layers=vision.num_layers,
        num_attention_heads=vision.num_attention_heads,
        image_size=vision.image_size,
        patch_size=vision.patch_size,
        hidden_act="gelu_pytorch_tanh",
        layer_norm_eps=vision.norm_epsilon,
        vision_use_head=False,
        tie_last_hidden_states=True,  # LLaVA takes the last hidden state, and that after the last norm, as ours
    )
    text = transformers.LlamaConfig(**text_sizes(language, vocabulary=VOCABULARY))
    whole = transformers.LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        attn_implementation="sdpa",
    )
    return transformers.LlavaForConditionalGeneration(whole).train()


def their_batch(batch: MicroBatch, options: Config) -> dict[str, Tensor]:
    """Return the same micro-batch in Transformers' format: images instead of patches, labels at their own token."""
    assert batch.images is not None
    patch, side = options.model.vision.patch_size, options.model.vision.image_size
    columns = batch.images.patches.unflatten(0, (-1, IMAGE_TOKENS)).transpose(1, 2)
    pixels = torch.nn.functional.fold(columns, (side, side), kernel_size=patch, stride=patch)
    labels = torch.full_like(batch.text.tokens, -100)
    labels[:, 1:] = torch.where(batch.text.loss_mask[:, :-1].bool(), batch.text.labels[:, :-1], -100)
    return {"input_ids": batch.text.tokens, "pixel_values": pixels, "labels": labels}


def save_as_ours(model: torch.nn.Module, options: Config, path: Path) -> None:
    """Write Transformers' weights under megavlm's names and in its shapes."""
    from megavlm.families.llava import FAMILY as LLAVA
    from megavlm.rules.defaults import resolve

    theirs = {name: param.detach() for name, param in model.named_parameters()}
    prefixes = next(each for each in LLAVA.name_prefixes if f"{each.vision}embeddings.patch_embedding.weight" in theirs)
    table = LLAVA.table(resolve(options, vocab_size=VOCABULARY).model, prefixes)
    flat = {name: param.flatten(1) if param.dim() > 1 else param for name, param in theirs.items()}
    shapes = {key: tuple(torch.cat([flat[name] for name in rule.hf_names]).shape) for key, rule in table.items()}
    weights = {
        key: torch.cat([flat[rows.name][rows.start : rows.start + rows.count] for rows in rule.hf_rows(shapes[key])])
        for key, rule in table.items()
    }
    torch.save(weights, path)


def their_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]
) -> Callable[[], Times]:
    """Return a function that runs and times one step as Transformers' users write it, clipping included."""

    def step() -> Times:
        cpu, start = time.process_time(), time.perf_counter()
        loss = model(**batch).loss
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        end, cpu = time.perf_counter(), time.process_time() - cpu
        return Times(
            step=end - start,
            forward=forward - start,
            backward=backward - forward,
            optimizer=end - backward,
            cpu=cpu,
            loss=value,
        )

    return step
