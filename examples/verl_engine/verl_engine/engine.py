"""The engine that verl drives, made of the parts of a run. Importing this module registers the strategy `megavlm`."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.config import EngineConfig
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

from megavlm import backend
from megavlm.arch.dims import dims_of
from megavlm.arch.layers import PATCH_EMBED
from megavlm.arch.packing import pack
from megavlm.command_line.configuration import to_train
from megavlm.config.derived import device_queues
from megavlm.data.types import Sample, Segment
from megavlm.errors import UserError
from verl_engine.rollouts import samples_of

# Modules that import megatron-core are imported in functions: `backend.activate` comes first.


@dataclass
class MegavlmEngineConfig(EngineConfig):
    """Configuration of the engine: `flags` are options as on megavlm's command line, with a layout and a --run-dir."""

    strategy: str = "megavlm"
    flags: str = ""


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch of verl (`data`), its packed form (`batch`), and the number of the sequence at each place of it."""

    data: Any
    batch: Any
    order: Sequence[int]

    def by_sequence(self, values: Tensor) -> Tensor:
        """Return values [B, S] of the rows' positions as a jagged tensor of sequences, in verl's order."""
        text, flat = self.batch.text, values.flatten()
        places = zip(text.prefixes, text.lengths, strict=True)
        pieces = {number: flat[at : at + n] for number, ((at, _), n) in zip(self.order, places, strict=True)}
        ordered = [pieces[number] for number in range(len(pieces))]
        ends = torch.tensor([0, *map(len, ordered)]).cumsum(0)
        return torch.nested.nested_tensor_from_jagged(torch.cat(ordered), ends.to(values.device))


@EngineRegistry.register(model_type="language_model", backend="megavlm", device=["cuda", "cpu"])
class MegavlmEngine(BaseEngine):
    """A run of megavlm as verl drives it."""

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any, **others: Any
    ) -> None:
        """Read the options; verl asks for this rank's place before `initialize`. Raises UserError."""
        super().__init__()
        if engine_config.param_offload or engine_config.optimizer_offload:
            raise UserError("param_offload and optimizer_offload move nothing here: set them to False, add --offload")
        self.mode: str | None = None
        self.config, world = to_train(
            words_of(model_config.local_path, optimizer_config, engine_config.flags), launched=dist.get_world_size()
        )
        if world != dist.get_world_size():
            raise UserError(f"verl has started {dist.get_world_size()} ranks, and the layout takes {world}")
        experts = self.config.model.experts
        if experts.aux_loss_coeff or experts.z_loss_coeff or experts.router_bias_update_rate:
            raise UserError(
                "losses of balance count tokens, and verl's losses do not: --set model.experts.aux_loss_coeff=0 "
                "model.experts.z_loss_coeff=0 model.experts.router_bias_update_rate=0"
            )
        self.dims = dims_of(self.config, world=world)
        self.at = self.dims.coordinates(dist.get_rank())
        self._saved: list[Path] = []
        self._has_gradients = False

    def initialize(self) -> None:
        """Build the run, with the weights of the model's folder."""
        chosen = backend.activate(queues=device_queues(self.config))
        from megavlm.train.build import build

        self.run = build(self.config, chosen)
        self.run.watch.close()  # it would take a long rollout for a hang
        self.run.engine.scheduler.step(increment=1)

    @property
    def is_param_offload_enabled(self) -> bool:
        return False

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return False

    @contextmanager
    def train_mode(self, **kwargs: Any) -> Iterator[None]:
        self.mode = "train"
        yield
        if kwargs.get("zero_grad_on_exit", True):
            self.optimizer_zero_grad()
        self.mode = None

    @contextmanager
    def eval_mode(self, **kwargs: Any) -> Iterator[None]:
        with self.run.engine.evaluation():
            self.mode = "eval"
            yield
        self.mode = None

    def optimizer_zero_grad(self) -> None:
        self.run.engine.optimizer.zero_grad()  # `Schedule.train` clears the buffers of gradients
        self._has_gradients = False

    def optimizer_step(self) -> float:
        """Update with the mean of the replicas' gradients; return its norm before clipping, NaN if fp16 overflowed."""
        from megavlm.train.step_result import sum_over_ranks

        engine, replicas = self.run.engine, self.dims.dp
        totals, squared = engine.schedule.no_totals(), engine.optimizer.squared_norm()
        _, norm = sum_over_ranks(totals, squared, (), model=engine.schedule.model, counts=False)
        if norm is None or not math.isfinite(norm):
            return math.nan
        engine.optimizer.update(norm=norm, tokens=replicas)
        return norm / replicas

    def lr_scheduler_step(self) -> float:
        """Advance the schedule; return the learning rate of the next update."""
        self.run.engine.scheduler.step(increment=1)
        return self.run.engine.learning_rate()

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Compute log-probabilities, verl's loss of them and, unless `forward_only`, the gradients.

        The last stage returns them as verl's other engines do, the other stages {}. Without gradients, entropies come
        with log-probabilities where verl asks for them.
        """
        if not (torch.as_tensor(tu.get(data, "temperature", 1.0)) == 1).all():
            raise UserError("logits have no temperature here: sample at temperature 1")
        entropy = tu.get(data, "calculate_entropy", False)
        if entropy and not forward_only:
            raise UserError("entropies have no gradient here: set entropy_coeff to 0")
        for name in ("enable_routing_replay", "distillation_use_topk", "use_fused_kernels"):
            if tu.get(data, name, False):
                raise UserError(f"verl asks for {name}, which this engine does not have: set it to False")
        group = self.get_data_parallel_group()
        tokens = _tokens_of(data["loss_mask"]).to(self.run.backend.device)
        dist.all_reduce(tokens, group=group)
        tu.assign_non_tensor(data, sp_size=self.dims.cp, batch_num_tokens=tokens.item(), dp_size=self.dims.dp)
        parts, indices = prepare_micro_batches(
            data=data,
            dp_group=group,
            num_batches_divided_by=self.dims.pp if self.dims.vpp > 1 else None,
            same_micro_num_in_dp=True,
        )
        asked = self._asked(parts)
        if forward_only:
            outputs = self._inferred(asked, loss_function, entropy=entropy)
        else:
            assert loss_function is not None
            outputs = self._trained(asked, loss_function)
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data) if outputs else {}

    def _asked(self, parts: Sequence[Any]) -> list[PackedBatch]:
        """Pack the sequences of each micro-batch into rows; images are for the ranks that encode them."""
        from megavlm.data.collate import CollateSpec
        from megavlm.data.collator import all_images
        from megavlm.data.costs import ImageAssignment
        from megavlm.data.loader import pinned
        from megavlm.model.specs import DTYPES

        run, groups = self.run, self.run.engine.groups
        own = None
        if run.plan.encoder:
            assignment = ImageAssignment.of(run.config, ranks=groups.replica.size())
            own = partial(assignment.own, rank=groups.replica_rank)
        elif self.at.pp == 0 and PATCH_EMBED in run.plan.chunks[0]:
            own = all_images
        spec = replace(CollateSpec.of(run.config, run.source), dtype=DTYPES[run.config.precision.dtype])
        samples: list[Sample] = []
        orders, segments = list[list[int]](), list[list[tuple[Segment, ...]]]()
        for data in parts:
            images = tu.get(data, "multi_modal_inputs", None) or [None] * len(data["input_ids"])
            found = samples_of(data, images, run.config.model)
            if (longest := max(map(len, found))) > spec.seq_length:
                raise UserError(f"a sequence has {longest} tokens: add --seq-length {longest} to the engine's flags")
            rows = pack([len(sample) for sample in found], spec.seq_length)
            segments.append([tuple(Segment(len(samples) + number) for number in row) for row in rows])
            orders.append([number for row in rows for number in row])
            samples += found
        run.source.samples = samples
        collated = run.source.collator(spec, own_images=own).collate(segments)
        batches = [pinned(each.batch, run.backend.device) for each in collated]
        return [PackedBatch(*each) for each in zip(parts, batches, orders, strict=True)]

    def _trained(self, asked: Sequence[PackedBatch], loss_function: Callable[..., Any]) -> list[dict[str, Any]]:
        from megavlm.data.context_parts import order_of
        from megavlm.pipeline.micro_batches import whole_rows

        if self._has_gradients:
            raise UserError("gradients of several batches are not added up: call optimizer_zero_grad between them")
        self._has_gradients = True
        group, split = self.run.engine.groups.collection.cp, self.dims.row_split
        waiting, outputs = iter(asked), list[dict[str, Any]]()

        def loss(batch: Any, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Return verl's loss of a micro-batch from the cross entropies of this rank's part of its rows.

            Each context-parallel rank computes the loss from whole rows, and the gradients of its own positions.
            """
            each, own = next(waiting), losses[: len(batch.text.tokens)]
            order = order_of(split, split.ranks * own.shape[1]).view(split.ranks, -1)[self.at.cp]
            rows = whole_rows(own.detach(), split, group).index_copy(1, order.to(own.device), own)
            output, found = self._loss(each, loss_function, log_probs=each.by_sequence(-rows))
            outputs.append(output)
            return found + 0.0 * losses.sum(), torch.ones_like(found, dtype=torch.int), torch.zeros_like(found)[None]

        self.run.engine.schedule.train([each.batch for each in asked], loss)
        return outputs

    def _inferred(
        self, asked: Sequence[PackedBatch], loss_function: Callable[..., Any] | None, *, entropy: bool
    ) -> list[dict[str, Any]]:
        from megavlm.model.cross_entropy import ENTROPY, LOGPROB

        outputs = []
        statistics = self.run.engine.schedule.statistics([each.batch for each in asked], top=0)
        for each, found in zip(asked, statistics, strict=False):  # none but on the last stage
            known = {"log_probs": LOGPROB, **({"entropy": ENTROPY} if entropy else {})}
            values = {name: each.by_sequence(found[..., column].float()) for name, column in known.items()}
            outputs.append(self._loss(each, loss_function, **values)[0])
        return outputs

    def _loss(
        self, each: PackedBatch, loss_function: Callable[..., Any] | None, **values: Tensor
    ) -> tuple[dict[str, Any], Tensor]:
        """Return the outputs of a micro-batch that verl reads, and its loss (1 without a loss function, as in verl)."""
        loss, metrics, device = torch.ones(()), {}, self.run.backend.device
        if loss_function is not None:
            data, group = each.data.to(device), self.get_data_parallel_group()
            loss, metrics = loss_function(model_output=values, data=data, dp_group=group)
        kept = {name: value.detach() for name, value in values.items()}
        return {"model_output": kept, "loss": loss.item(), "metrics": metrics}, loss

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Return the tensors of the model by Hugging Face's names, adapters merged; every rank iterates."""
        from megavlm.weights import Weights

        return iter(Weights(self.run.engine.trained(), self.run.config, self.run.run_dir)), None

    def get_data_parallel_size(self) -> int:
        return self.dims.dp

    def get_data_parallel_rank(self) -> int:
        return self.at.dp

    def get_data_parallel_group(self) -> Any:
        return self.run.engine.groups.dp

    def is_mp_src_rank_with_outputs(self) -> bool:
        return self.at.tp == self.at.cp == 0 and self.at.pp == self.dims.pp - 1

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Keep all tensors on their device. Raises NotImplementedError if verl wants to move them off a GPU."""
        if device == "cpu" and not self.run.backend.is_cpu and (model or optimizer or grad):
            raise NotImplementedError("megavlm's weights and gradients do not leave the GPU")

    def disable_adapter(self) -> NoReturn:
        """Raise UserError: verl would compare the policy with itself."""
        raise UserError("adapters cannot be left out for the reference: give verl a reference model of its own")

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Save a checkpoint, which any layout can load, in the folder `local_path`. Raises UserError."""
        from megavlm.checkpoint import folders, state
        from megavlm.parallel.rendezvous import on_rank_0

        if hdfs_path is not None or self.run.saver is None:
            raise UserError("checkpoints are on disks here: leave hdfs_path and --no-save out")
        run = self.run
        position = state.Position(iteration=global_step, loader=run.data_loader.state_dict())
        state.save(run.engine.trained(), position, config=run.config, plan=run.plan, saver=run.saver)
        run.saver.wait()
        errors = [report.error for report in run.saver.poll() if report.error is not None]

        def move() -> None:
            if errors:
                raise UserError(f"the checkpoint of step {global_step} cannot be saved: {errors[0]}")
            shutil.rmtree(local_path, ignore_errors=True)
            Path(local_path).parent.mkdir(parents=True, exist_ok=True)
            written = folders.folder_for(run.run_dir / "checkpoints", global_step)
            shutil.move(written, Path(local_path) / written.name)
            self._saved = [path for path in self._saved if path != Path(local_path)] + [Path(local_path)]
            while max_ckpt_to_keep and len(self._saved) > max_ckpt_to_keep:
                shutil.rmtree(self._saved.pop(0), ignore_errors=True)

        on_rank_0(move)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **kwargs: Any
    ) -> None:
        """Load the checkpoint in `local_path` without deleting it. Raises UserError."""
        from megavlm.checkpoint import state
        from megavlm.checkpoint.folders import Holds
        from megavlm.checkpoint.reading import Choices, choices_of, load_newest
        from megavlm.checkpoint.summary import check_fits, read_summary
        from megavlm.parallel.rendezvous import from_rank_0

        run, holds = self.run, Holds()
        choices = from_rank_0(lambda: choices_of(Path(local_path), holds, fallback=False), Choices(()))
        _, position = load_newest(
            choices,
            check=lambda folder: check_fits(read_summary(folder), run.config, folder),
            load=lambda folder: state.load(run.engine.trained(), folder, config=run.config, plan=run.plan),
            say=print,
        )
        holds.release()
        schedule = run.engine.scheduler
        schedule.step(increment=position.iteration + 1 - schedule.num_steps)


def words_of(folder: str, optimizer: Any, flags: str) -> list[str]:
    """Return command-line arguments of megavlm for verl's options; `flags` come last and override them."""
    words = ["--extension", "verl_engine", "--data", "rollouts", "--init-from", folder, "--no-tensorboard"]
    if optimizer is not None:
        words += [*("--lr", str(optimizer.lr)), *("--weight-decay", str(optimizer.weight_decay))]
        words += ["--clip-grad", str(optimizer.clip_grad), "--lr-decay-style", "constant"]
        words += ["--adam-beta1", str(optimizer.betas[0]), "--adam-beta2", str(optimizer.betas[1])]
        words += ["--lr-warmup-iters", str(max(optimizer.lr_warmup_steps or 0, 0))]
    return words + shlex.split(flags)


def _tokens_of(mask: Tensor) -> Tensor:
    return (mask.values() if mask.is_nested else mask).sum().float()
