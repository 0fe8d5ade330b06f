"""What every family of Hugging Face checkpoints must show, in one process: logits, gradients, training, round trip."""

from __future__ import annotations

import copy
import filecmp
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.image_processing_utils import select_best_resolution

from megavlm.arch.image_tokens import TileGroup, chunk_lengths, features_of, grid_of, tokens_per_image
from megavlm.arch.plan import make_plan
from megavlm.checkpoint import state
from megavlm.checkpoint.folders import Keep
from megavlm.checkpoint.hf.hf_files import HfFolder
from megavlm.checkpoint.hf.importing import load_weights
from megavlm.checkpoint.hf.pretrained import ALL_PARTS, Pretrained, with_pretrained_model
from megavlm.checkpoint.saving import Saver
from megavlm.command_line.parsing import parse
from megavlm.config.schema import Config, ModelConfig
from megavlm.data.collate import CollateSpec, collate
from megavlm.data.tokenizers import NO_IMAGE
from megavlm.data.types import Sample
from megavlm.families import family_of
from megavlm.inputs.batch import MicroBatch
from megavlm.inputs.layout import Film
from megavlm.inputs.patches import Image, LoadedImage, cells_of, normalised
from megavlm.inputs.sounds import Sound
from megavlm.model.vlm import VLMChunk
from megavlm.model.weights import index_of, real_shape
from megavlm.programs import convert
from megavlm.rules.defaults import resolve
from megavlm.train.build_engine import build_engine
from megavlm.train.engine import Engine
from megavlm.train.run_dir import configuration, write_sidecars
from tests.support.gates import TOLERANCES, hold
from tests.support.harness import Single, difference, random_image, randomize

LENGTH = 48
ADAMW = (
    "--precision fp32 --lr 1e-3 --lr-decay-style constant --lr-warmup-iters 0 --weight-decay 0 --adam-beta2 0.999 "
    "--clip-grad 0"
)


def save(theirs: transformers.PreTrainedModel, folder: Path, **options: Any) -> Path:
    """A checkpoint with no parameter at its start value, and files beside it that an export must bring back."""
    randomize(theirs, seed=1).save_pretrained(folder, **options)
    (folder / "tokenizer_config.json").write_text('{"kept": "as it is"}')
    (folder / "chat_template.jinja").write_text("{{ kept }}")
    return folder


def config_for(folder: Path, seq_length: int = LENGTH, flags: Sequence[str] = ()) -> Config:
    """A run that starts from the folder."""
    argv = f"--init-from {folder} --run-dir {folder / 'run'} --seq-length {seq_length} {ADAMW}"
    return resolve(with_pretrained_model(parse([*argv.split(), *flags])))


def engine_for(config: Config, folder: Path, single: Single) -> Engine:
    """The engine that training uses, its weights from the folder."""
    vocabulary = config.model.language.vocab_size
    assert vocabulary is not None
    source = Pretrained.of(folder, *ALL_PARTS, predictors=config.model.language.mtp_layers)
    fill = partial(load_weights, pretrained_list=[source], config=config, vocab_size=vocabulary)
    plan = make_plan(config, single.groups.dims)
    engine = build_engine(config, plan, single.groups, vocab_size=vocabulary, backend=single.backend, weights=fill)
    single.engines.append(engine)
    return engine


def batch_of(
    config: Config,
    images: Sequence[Sequence[tuple[int, ...]]] = (((32, 32), (32, 32)), ()),
    *,
    seed: int = 3,
    packed: bool = False,
) -> MicroBatch:
    """A micro-batch of `samples_of`. With `packed`, all samples share one row."""
    samples = samples_of(config, images, seed=seed)
    return batch_of_rows(config, [samples] if packed else [[sample] for sample in samples])


def samples_of(config: Config, images: Sequence[Sequence[tuple[int, ...]]], *, seed: int) -> list[Sample]:
    """For each sample its images, (height, width), its videos, (frames, height, width), and its sounds, (mel frames,),
    with words before, between and after them.
    """
    model = config.model
    image_token, vocabulary = model.image_token, model.language.vocab_size
    image_token = NO_IMAGE if image_token is None else image_token
    assert vocabulary is not None
    rng = np.random.default_rng(seed)
    samples = []
    for number, sizes in enumerate(images):
        words = [
            word
            for word in rng.integers(1, vocabulary, 64).tolist()
            if word not in (image_token, model.video_token, model.audio_token, *model.canvas_tokens)
        ]
        sounds, sizes = (
            _sounds([size[0] for size in sizes if len(size) == 1], model, rng),
            [s for s in sizes if len(s) > 1],
        )
        seen, groups = tiled(sizes, model)
        held = tuple(_picture(size, model, seed=seed + 10 * number + place) for place, size in enumerate(seen))
        counts = iter(tokens_per_image([grid for each in held for grid in each.grids], groups, model.projector))
        tokens: list[int] = []
        for sound in sounds:
            tokens += [words.pop(), *[model.audio_token or 0] * features_of(sound.frames, model.audio), words.pop()]
        for each, before in zip(groups or held, (None, *(groups or held)), strict=False):
            if isinstance(each, TileGroup) and each.kind != "image":
                inside = isinstance(before, TileGroup) and before.kind == "frame"
                tokens += [words.pop(), words.pop()][: 0 if inside else 2] + [model.video_token or 0] * next(counts)
            elif not isinstance(each, TileGroup) and (model.canvas_tokens or each.arrangement != (0, 0)):
                tokens += [words.pop(), *marked(each, counts, model)]
            elif isinstance(each, TileGroup) or each.film is None:
                tokens += [words.pop(), words.pop()] + [image_token] * next(counts)
            else:
                # In Qwen3-VL and Gemma 4, a time precedes each frame; in Kimi-K2.5 each chunk, of image tokens.
                apart = _are_apart(model) or model.language.bidirectional_windows or model.video_token is None
                tokens.append(words.pop())
                for place, _ in enumerate(each.grids):
                    tokens += [words.pop()] * (apart or not place) + [model.video_token or image_token] * next(counts)
        tokens += [words.pop() for _ in range(12 + number)]
        samples.append(Sample(np.array(tokens), np.arange(len(tokens)) >= len(tokens) - 6, held, groups, sounds=sounds))
    return samples


def batch_of_rows(config: Config, rows: Sequence[Sequence[Sample]]) -> MicroBatch:
    """A micro-batch of these rows; one of several samples has room for as many sequences."""
    model = config.model
    return collate(
        rows,
        CollateSpec(
            seq_length=config.train.seq_length * max(map(len, rows)),
            image_token=NO_IMAGE if model.image_token is None else model.image_token,
            pad_token=0,
            projector=model.projector,
            patch_dim=model.vision.in_channels * model.vision.patch_size**2,
            video_token=model.video_token,
            audio_token=model.audio_token,
            audio=model.audio,
            frames_per_patch=model.vision.temporal_patch_size,
            mrope=bool(model.language.mrope_section),
            canvas_tokens=model.canvas_tokens,
        ),
    )


def _sounds(frames: Sequence[int], model: ModelConfig, rng: np.random.Generator) -> tuple[Sound, ...]:
    mels = (torch.from_numpy(rng.standard_normal((each, model.audio.mel_bins), np.float32)) for each in frames)
    return tuple(Sound(len(each), lambda each=each: each) for each in mels)  # type: ignore[misc]


def marked(image: Image | LoadedImage, counts: Iterator[int], model: ModelConfig) -> list[int]:
    """Return the tokens of an image and its slices, or of a video's frames, between MiniCPM-V's marks."""
    before_slice, behind_slice, before, behind, line_break = model.canvas_tokens or (1, 2, 3, 4, 5)
    feature = model.image_token if image.film is None else model.video_token
    assert feature is not None
    if image.film is not None:
        return [token for _ in image.grids for token in (before, *[feature] * next(counts), behind)]
    tokens = [before, *[feature] * next(counts), behind]
    for number in range(len(image.grids) - 1):
        tokens += [line_break] * (number > 0 == number % image.arrangement[1])
        tokens += [before_slice, *[feature] * next(counts), behind_slice]
    return tokens


def _picture(size: Any, model: ModelConfig, *, seed: int) -> Image | LoadedImage:
    """An image, or a video whose groups of frames are 0, 3, 6, … steps of M-RoPE from its beginning, or among text."""
    patch, span = model.vision.patch_size, model.vision.temporal_patch_size
    if isinstance(size[0], tuple):  # sliced
        copy, (rows, columns), part = size
        sizes: list[tuple[int, int]] = [copy, *[part] * (rows * columns)]
        arrays = [random_image(*sides, seed=seed + 100 * number) for number, sides in enumerate(sizes)]
        pixels = torch.cat([normalised([cells_of(array, patch)], 1, mean=0.5, std=0.5) for array in arrays])
        return LoadedImage(tuple(grid_of(*sides, patch_size=patch) for sides in sizes), pixels, (rows, columns))
    *frames, height, width = size
    arrays = [random_image(height, width, seed=seed + 100 * number) for number in range(*frames or [1])]
    if not frames:
        return Image(height, width, patch, partial(np.asarray, arrays[0]))
    groups = -(-len(arrays) // span)
    moments = () if _are_apart(model) else tuple(range(0, 3 * groups, 3))
    film = Film(tuple(range(len(arrays))), (0.0,) * len(arrays), moments)
    pixels = normalised([cells_of(array, patch) for array in arrays], span, mean=0.5, std=0.5)
    grid = grid_of(height, width, patch)
    chunks = tuple((*grid, count) if count > 1 else grid for count in chunk_lengths(len(arrays), 4))  # Kimi-K2.5's
    return LoadedImage(chunks if model.video_token is None else (grid,) * groups, pixels, film=film)


def _are_apart(model: ModelConfig) -> bool:
    """Whether there is text between the groups of a video, as in Qwen3-VL and not in Qwen3-Omni."""
    return model.language.mrope_interleaved and model.video_steps_per_second is None


def tiled(
    sizes: Sequence[tuple[int, ...]], model: ModelConfig
) -> tuple[Sequence[tuple[int, ...]], tuple[TileGroup, ...]]:
    """What the tower sees of a sample's images, tiled as Transformers would with the resolutions of `resolutions`."""
    if model.projector.anyres_max_tiles is None:
        return sizes, ()
    side, groups = model.vision.image_size, list[TileGroup]()
    alone = sum(len(size) == 2 for size in sizes) == 1
    for *frames, height, width in sizes:
        size = (height, width)
        if frames:
            groups += [TileGroup((0, 0), size, "frame")] * (frames[0] - 1) + [TileGroup((0, 0), size, "last frame")]
            continue
        rows, columns = select_best_resolution(size, resolutions(side)) if alone else (0, 0)
        groups.append(TileGroup((rows // side, columns // side), size))
    return [(side, side)] * sum(group.tiles for group in groups), tuple(groups)


def resolutions(side: int) -> list[list[int]]:
    """Up to three tiles a side (image_grid_pinpoints)."""
    return [[side * rows, side * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]


def loss_of(theirs: Any, pretrained: Pretrained, batch: MicroBatch, config: Config) -> tuple[Tensor, Tensor]:
    """Mean cross entropy over the trained tokens, and the logits, of the Transformers model."""
    assert pretrained.family.inputs is not None
    logits = theirs(**pretrained.family.inputs(batch, config.model), use_cache=False).logits
    labels = torch.where(batch.text.loss_mask.bool(), batch.text.labels, -100)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def assert_same_logits_and_gradients(folder: Path, theirs: Any, single: Single, batches: Sequence[Any]) -> None:
    """Logits and the gradient of every parameter, relative to their largest values.

    `batches`: for each micro-batch what `batch_of` takes: the image sizes of each sample.
    """
    config = config_for(folder)
    engine, pretrained = engine_for(config, folder, single), Pretrained.of(folder, *ALL_PARTS)
    assert pretrained.problems() == []
    chunk = engine.chunks[0].module
    shapes = unpadded_shapes(chunk, config)
    assert pretrained.table.keys() == shapes.keys()
    family, seen = pretrained.family.name, "video_" if with_videos(batches) else ""
    for number, images in enumerate(batches):
        given = batch_of(config, images, seed=number)
        (logits,) = engine.schedule.logits([given])
        theirs.zero_grad()
        loss, expected = loss_of(theirs, pretrained, given, config)
        hold(family, f"{seen}logits", difference(logits, expected.detach(), "logits"))
        if not seen:
            hold(family, "cosine", angle(logits, expected.detach()))

        loss.backward()
        engine.optimizer.zero_grad()
        loss_sum, tokens = engine.schedule.train([given]).tolist()
        assert abs(loss_sum / tokens - loss.item()) <= 1e-5 * loss.item()
        gradients = Pretrained.of(save_gradients(theirs, folder / f"gradients{number}"), *ALL_PARTS)
        assert_same_gradients(gradients_of(chunk, tokens), gradients, shapes, family, f"{seen}gradients")


def assert_same_gradients(
    found: Mapping[str, Tensor],
    gradients: Pretrained,
    shapes: Mapping[str, tuple[int, ...]],
    family: str,
    gate: str,
    *,
    tolerance: float = TOLERANCES["gradients"],
) -> None:
    """All gradients are those of a folder of `save_gradients`."""
    for name, ours in found.items():
        wanted = gradients.read_slice(name, shapes[name], tuple(slice(0, size) for size in shapes[name]))
        if wanted.abs().max() > 1e-7:
            off = difference(ours, wanted, f"gradient of {name}")
            hold(family, gate, off, f"gradient of {name}")
            assert off < tolerance, f"gradient of {name}: differs by {off:.1e}"
        else:
            assert ours.abs().max() < 1e-6, f"gradient of {name} where Transformers has none"


def gradients_of(chunk: VLMChunk, tokens: float | None = None) -> dict[str, Tensor]:
    """Return the gradients of a model by global name, in the shapes of checkpoints; buffers as they are.

    `tokens` is how many trained tokens the gradients are of that an optimizer has summed, if one has.
    """
    weights = [(param, param.data) for param in chunk.parameters()]
    found: dict[str, Tensor] = {}
    for param, _ in weights:
        gradient = param.main_grad / tokens if tokens is not None else param.grad
        param.data = torch.zeros_like(param) if gradient is None else gradient  # so that each shard is a slice of it
    for shard in chunk.shards():
        found.setdefault(shard.key, torch.zeros(shard.global_shape))[index_of(shard)] = shard.data
    for param, data in weights:
        param.data = data
    return found


def with_videos(batches: Sequence[Any]) -> bool:
    """Whether any sample of these micro-batches has a video."""
    return any(len(size) == 3 for images in batches for sizes in images for size in sizes)


def angle(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest 1 − cosine of the logits of one token."""
    cosines = torch.nn.functional.cosine_similarity(ours.double(), theirs.double(), dim=-1)
    return float((1 - cosines).max().clamp(min=0.0))


def save_gradients(theirs: Any, folder: Path) -> Path:
    """Gradients saved as if they were weights, to be read through the same table."""
    holder = copy.deepcopy(theirs)
    with torch.no_grad():
        for param, trained in zip(holder.parameters(), theirs.parameters(), strict=True):
            param.copy_(torch.zeros_like(trained) if trained.grad is None else trained.grad)
    holder.save_pretrained(folder)
    return folder


def losses_of(theirs: Any, pretrained: Pretrained, config: Config, steps: Iterable[Sequence[Any]]) -> Iterator[float]:
    """Train the Transformers model with torch's AdamW; yield the mean loss of each step's micro-batches.

    Micro-batches of a step must train equally many tokens.
    """
    options = config.optimizer
    betas = (options.adam_beta1, options.adam_beta2)
    adamw = torch.optim.AdamW(theirs.parameters(), lr=options.lr, betas=betas, eps=options.adam_eps, weight_decay=0.0)
    for batches in steps:
        # Zeros, not None: without an image, AdamW goes on with the moments of the vision part, as it does here.
        adamw.zero_grad(set_to_none=False)
        losses = []
        for batch in batches:
            loss, _ = loss_of(theirs, pretrained, batch, config)
            (loss / len(batches)).backward()
            losses.append(loss.item())
        adamw.step()
        yield fmean(losses)


def assert_same_training(folder: Path, theirs: Any, single: Single, batches: Sequence[Any]) -> None:
    """Five AdamW steps on the same batches: relative differences of the losses."""
    config = config_for(folder)
    engine, pretrained = engine_for(config, folder, single), Pretrained.of(folder, *ALL_PARTS)
    gate = "video_losses" if with_videos(batches) else "losses"
    steps = [[batch_of(config, batches[number % len(batches)], seed=number % 2)] for number in range(5)]
    for number, (given, loss) in enumerate(zip(steps, losses_of(theirs, pretrained, config, steps), strict=True)):
        ours = engine.train_step(given).loss
        hold(pretrained.family.name, gate, abs(ours - loss) / loss, f"step {number}: {ours} against {loss}")


def family_in(folder: Path) -> str:
    """Return the name of the family to which a Hugging Face folder belongs."""
    return family_of(HfFolder(folder).settings).name


def run_of(folder: Path, out: Path, single: Single, flags: Sequence[str] = ()) -> Path:
    """Write the run `out` that began with the folder and has saved before its first step."""
    given = parse([*f"--init-from {folder} --run-dir {out} --seq-length {LENGTH} {ADAMW}".split(), *flags])
    config = resolve(with_pretrained_model(given))
    saver = Saver(out / "checkpoints", Keep(0))
    trained, plan = engine_for(config, folder, single).trained(), make_plan(config, single.groups.dims)
    state.save(trained, state.Position(0, {}), config=config, plan=plan, saver=saver)
    saver.wait()
    assert saver.poll()[0].error is None
    saver.close()
    (out / "config.yaml").write_text(configuration(given))
    write_sidecars(out, config, None, image_token=config.model.image_token or 0)
    return out


def unpadded_shapes(chunk: VLMChunk, config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by name, without the padding that tensor parallelism adds."""
    vocabulary = config.model.language.vocab_size
    return {
        shard.key: real_shape(shard.key, tuple(shard.global_shape), config.model, vocab_size=vocabulary)
        for shard in chunk.shards()
    }


def assert_round_trip(folder: Path, out: Path, single: Single, flags: Sequence[str] = ()) -> None:
    """A run gives every file back: the same tensors bit for bit, and all others byte for byte."""
    run_of(folder, out / "ours", single, flags)
    assert convert.main(["export", str(out / "ours"), str(out / "theirs")]) == 0
    before, after = ({file.name for file in path.iterdir() if file.is_file()} for path in (folder, out / "theirs"))
    # safetensors files are written in the library's own layout, too
    _, different, unreadable = filecmp.cmpfiles(folder, out / "theirs", before & after, shallow=False)
    changed = [*(before ^ after), *different, *unreadable]
    hold(family_in(folder), "import_export", len(changed), f"files {changed}")


def different(folder: Path, other: Path) -> list[str]:
    """Return the names of the files of a folder that another one has not, byte for byte."""
    names = {file.name for file in folder.iterdir() if file.is_file()}
    _, changed, unreadable = filecmp.cmpfiles(folder, other, names, shallow=False)
    return [*changed, *unreadable]
