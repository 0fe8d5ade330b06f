"""Cross entropy of logits whose columns are sharded over tensor-parallel ranks, in the precision of the logits.

Arithmetic is in fp32 for a few positions at a time, so that there is never an fp32 copy of all logits. The gradient
overwrites the logits. `linear_cross_entropy` computes the output layer and its loss as one operation, with the logits
of some positions in memory at a time. The loss of position t is log Σ exp(x) − x[label] with x = W h, and with several
labels k of weights w_k, which add up to 1 (distillation), log Σ exp(x) − Σ w_k x[label k]. Its gradients, multiplied by
the loss's own gradient g:

    of h_t:  g_t Σ over rows v of the vocabulary of p_tv W_v,  with p = softmax(x) − Σ w_k 1[label k]
    of W_v:  Σ over positions t of g_t p_tv h_t

The first needs all rows for some positions: it is computed in the forward pass, while their logits are in memory, and
multiplied by g in the backward pass. The second needs all positions for some rows: the backward pass recomputes the
logits for one block of the vocabulary after the other, each of as many bytes. So each gradient is one product, rounded
once, and needs no buffer in fp32. No product is repeated if the weight is not trained, or if one chunk holds all
positions, whose p then stays in memory.

Computing the gradient beside the loss follows Liger Kernel (Hsu et al. 2024), which sums the weight's over chunks of
positions; computing logits twice follows Cut Cross-Entropy (Wijmans et al. 2024), whose kernel keeps none in memory.
Legend: T positions, H width, W rows of the vocabulary on this tensor-parallel rank, V of a block of them, K labels of a
position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from torch import Tensor
from torch.autograd.function import once_differentiable

from megavlm.arch.ends import LOSS_WORK
from megavlm.model.weight_gradients import LaterGradient, WeightGradients, has_halves

# A function like `vocab_parallel_cross_entropy`.
CrossEntropy = Callable[[Tensor, Tensor, dist.ProcessGroup], tuple[Tensor, Tensor, Tensor]]


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: dist.ProcessGroup,
    *,
    weights: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return −log softmax(logits)[label] of each position, and m and s of its softmax exp(x − m)/s: [T] fp32 each.

    The logits [T, W], in any precision, are overwritten with the gradient of the loss: (softmax − 1[label]) · `unit_of`
    their type. With `softcap` it is the gradient of the logits before `bounded`. A label [T] in no rank's columns has
    logit 0. With labels [T, K] and their `weights` [T, K], the loss is the weighted mean over a position's labels.
    """
    columns, shares = own_columns(labels, weights, first=group.rank() * logits.shape[1], width=logits.shape[1])
    predicted = label_logits(logits, columns, shares)
    pieces = [_largest_and_sum(part) for (part,) in in_pieces(logits)]
    largest, sums = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    largest, sums, predicted = over_ranks(largest, sums, predicted, group)
    unit = torch.full_like(sums, unit_of(logits.dtype))
    for piece in in_pieces(logits, largest, sums, columns, shares, unit):
        write_gradient(*piece, softcap=softcap)
    return sums.log() - (predicted - largest), largest, sums


def te_cross_entropy(
    kernel: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `vocab_parallel_cross_entropy` with Transformer Engine's kernel. Its `unit_of` is 1.

    The kernel steps through rows by the last stride of the labels and the second last of the logits, so both must be
    contiguous. Its loss is log Σ exp(x) − x[label], from which m = log Σ exp(x) follows with s = 1.
    """
    predicted = label_logits(logits, *own_columns(labels, first=group.rank() * logits.shape[1], width=logits.shape[1]))
    if group.size() > 1:
        dist.all_reduce(predicted, group=group)
    loss = kernel(logits[None], labels[None].contiguous(), group, is_cg_capturable=True)[0]
    return loss, loss + predicted, torch.ones_like(loss)


def unit_of(dtype: torch.dtype) -> float:
    """Return the scale of stored logit gradients: in fp16, unscaled probabilities below 6e-8 would become 0."""
    return 2.0**12 if dtype == torch.float16 else 1.0


def in_pieces(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of each tensor with as many positions as `LOSS_WORK` holds in fp32."""
    count = max(1, LOSS_WORK // (4 * logits.shape[1]))
    return zip(*(tensor.split(count) for tensor in (logits, *others)), strict=True)


def own_columns(labels: Tensor, weights: Tensor | None = None, *, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Return each label's column among `width` from `first` on (else 0), and its weight there (else 0), [T, K] each.

    Labels [T], without `weights`, have weight 1.
    """
    columns = (labels[:, None] if weights is None else labels) - first
    held = (columns >= 0) & (columns < width)
    return columns.where(held, 0), held.float() if weights is None else weights.where(held, 0.0)


def label_logits(logits: Tensor, columns: Tensor, shares: Tensor) -> Tensor:
    """Return the weighted sum of the logits of each position's labels on this rank, [T] fp32."""
    return (logits.gather(1, columns).float().where(shares > 0, 0.0) * shares).sum(1)


def _largest_and_sum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return m and Σ exp(x − m) of each position's logits on this rank, [T] fp32 each."""
    largest = logits.amax(1, keepdim=True).float()
    return largest[:, 0], (logits - largest).exp_().sum(1)


def over_ranks(largest: Tensor, sums: Tensor, predicted: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Reduce the per-rank maximum, sum and label logit [T] over tensor-parallel ranks, in two all-reduces."""
    if group.size() == 1:
        return largest, sums, predicted
    whole = largest.clone()
    dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)
    added = torch.stack([sums * (largest - whole).exp_(), predicted])
    dist.all_reduce(added, group=group)
    return whole, *added.unbind()


def write_gradient(
    logits: Tensor,
    largest: Tensor,
    sums: Tensor,
    columns: Tensor,
    shares: Tensor,
    gradient: Tensor,
    *,
    softcap: float | None = None,
) -> None:
    """Overwrite the logits x with (exp(x − m)/s − Σ w 1[label]) · gradient, times `bounded`'s slope, 1 − (x/c)²."""
    scaled, rows = (logits - largest[:, None]).exp_(), torch.arange(len(columns), device=columns.device)
    for column, share in zip(columns.unbind(1), shares.unbind(1), strict=True):  # of a token named twice, both count
        scaled[rows, column] -= sums * share
    if softcap is not None:
        scaled *= (1 - (logits.float() / softcap).square_()).clamp_(min=0.0)  # padding is far below −c
    torch.mul(scaled, (gradient / sums)[:, None], out=logits)


_ALIGNED = 16  # rows of a block are a multiple of this: fast products need aligned rows of logits


@dataclass(frozen=True)
class LossOptions:
    """How the loss is computed: `chunk` positions at a time, from logits whose columns are sharded over `group`.

    `real`: the number of this rank's columns without padding. `sums_in_place`: NVIDIA Apex's kernel adds the
    weight's gradient to its `main_grad`.
    """

    group: dist.ProcessGroup
    real: int
    chunk: int
    cross_entropy: CrossEntropy
    sums_in_place: bool = False
    softcap: float | None = None  # of `bounded`
    weight_gradients: WeightGradients | None = None  # delays the weight's gradient; None: not delayed


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, options: LossOptions, label_weights: Tensor | None = None
) -> Tensor:
    """Return the cross entropy of each position, fp32 [T], from hidden states [T, H], weight [W, H] and labels [T].

    With labels [T, K] and `label_weights` [T, K], it is the weighted mean over a position's labels. The gradient of the
    hidden states is this rank's share of a sum over tensor-parallel ranks. The backward pass overwrites the saved
    tensors, so autograd refuses a second one.
    """
    reached, later = hidden.requires_grad and torch.is_grad_enabled(), None
    if options.weight_gradients is not None and has_halves(hidden, weight):
        later = LaterGradient(weight, options.weight_gradients)
    operand = weight if later is None else weight.detach()
    return _LinearCrossEntropy.apply(hidden, operand, labels, label_weights, options, reached, later)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        label_weights: Tensor | None,
        options: LossOptions,
        reached: bool,
        later: LaterGradient | None,
    ) -> Tensor:
        trained, ctx.kept, ctx.later = weight.requires_grad or later is not None, len(hidden) <= options.chunk, later
        terms, kept = [], []
        of_hidden = torch.empty_like(hidden) if reached else None
        for start in range(0, max(1, len(hidden)), options.chunk):
            part = slice(start, start + options.chunk)
            logits = logits_of(hidden[part], weight, real=options.real, softcap=options.softcap)
            if label_weights is None:
                found = options.cross_entropy(logits, labels[part], options.group)
            else:  # which Transformer Engine's kernel does not take
                weights = label_weights[part]
                found = vocab_parallel_cross_entropy(
                    logits, labels[part], options.group, weights=weights, softcap=options.softcap
                )
            terms.append(torch.stack(found))
            if of_hidden is not None:
                torch.mm(logits, weight, out=of_hidden[part])
            kept += [logits] * ctx.kept
            del logits  # before those of the next chunk are computed
        per_position = torch.cat(terms, dim=1)
        needed = (hidden, weight, *(kept if ctx.kept else (labels, label_weights, per_position)))
        ctx.save_for_backward(of_hidden, *(needed if trained else (None, None)))
        ctx.options, ctx.unit = options, unit_of(hidden.dtype)
        owner = weight if later is None else later.weight
        ctx.main_grad = vars(owner)["main_grad"] if trained and options.sums_in_place else None
        return per_position[0].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, arrives: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, hidden, weight, *rest = ctx.saved_tensors
        scale = (arrives / ctx.unit)[:, None]
        if of_hidden is not None:
            of_hidden.mul_(scale)
        if weight is None:
            return of_hidden, None, None, None, None, None, None
        later, options, kept, main_grad = ctx.later, ctx.options, ctx.kept, ctx.main_grad

        def of_weight() -> Tensor:
            gradient, add = _destination(weight if later is None else later.weight, hidden, main_grad)
            if kept:
                add(rest[0].mul_(scale), slice(None))
            else:
                labels, label_weights, per_position = rest
                _compute_again(hidden, weight, labels, label_weights, per_position, arrives, options, add)
            return gradient

        if later is None:
            return of_hidden, of_weight(), None, None, None, None, None
        later.leave(of_weight)
        return of_hidden, None, None, None, None, None, None


Add = Callable[[Tensor, slice], object]  # adds the gradient of some rows of the weight, given that of their logits


def _compute_again(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_weights: Tensor | None,
    per_position: Tensor,
    arrives: Tensor,
    options: LossOptions,
    add: Add,
) -> None:
    """Recompute the logits block by block of the vocabulary, and call `add` with the gradient of each block."""
    _, largest, sums = per_position
    rows = block_rows(len(weight), len(hidden), chunk=options.chunk)
    for start in range(0, len(weight), rows):
        block = weight[start : start + rows]
        logits = logits_of(hidden, block, real=options.real - start, softcap=options.softcap)
        first = options.group.rank() * len(weight) + start
        columns, shares = own_columns(labels, label_weights, first=first, width=len(block))
        for piece in in_pieces(logits, largest, sums, columns, shares, arrives):
            write_gradient(*piece, softcap=options.softcap)
        add(logits, slice(start, start + rows))
        del logits, piece  # before those of the next block are computed


def _destination(weight: Tensor, hidden: Tensor, main_grad: Tensor | None) -> tuple[Tensor, Add]:
    """Return the weight's gradient, and the function that adds a block to it.

    With `main_grad`, as megatron-core's layer: the gradient for autograd is never read, and its mark says so.
    """
    if main_grad is None:
        gradient = torch.empty_like(weight)
        return gradient, lambda logits, rows: torch.mm(logits.t(), hidden, out=gradient[rows])
    kernel = layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32
    weight.main_grad, weight.grad_added_to_main_grad = main_grad, True  # type: ignore[attr-defined]
    unread = layers.get_dummy_wgrad(list(weight.shape), weight.dtype) if layers.HAVE_TE else torch.empty_like(weight)
    return unread, lambda logits, rows: kernel(hidden, logits, main_grad[rows])


def block_rows(width: int, positions: int, *, chunk: int) -> int:
    """Return the number of rows of a block of the vocabulary.

    The vocabulary is cut into as many blocks as there are chunks of positions, so that the logits [T, V] of a block
    take as much memory as those of a chunk, [chunk, W].
    """
    chunks = max(1, -(-positions // chunk))
    return min(width, -(-width // (chunks * _ALIGNED)) * _ALIGNED)


def bounded(logits: Tensor, softcap: float | None) -> Tensor:
    """Return the logits x bounded to c · tanh(x / c), in place, with the softcap c; None: unchanged."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def logits_of(hidden: Tensor, weight: Tensor, *, real: int, softcap: float | None) -> Tensor:
    """Return the logits h·W, `bounded`. Columns from `real` on are padding, with a softmax and a gradient of 0."""
    logits = bounded(hidden @ weight.t(), softcap)
    if real < len(weight):
        logits[:, max(0, real) :] = torch.finfo(logits.dtype).min
    return logits


LOGPROB, ENTROPY = range(2)  # of statistics; then the largest log-probabilities, and their tokens


@torch.no_grad()
def token_statistics(hidden: Tensor, weight: Tensor, labels: Tensor, options: LossOptions, *, top: int) -> Tensor:
    """Return the statistics of each position, [T, 2 + 2·top] float64, from hidden states [T, H] and weight [W, H].

    They are the log-probability of the label [T], the entropy H, the `top` largest log-probabilities, and their tokens.
    All ranks return the same. With m the largest logit x of a position over all ranks, S = Σ exp(x − m) and
    D = Σ exp(x − m)·(x − m) over the vocabulary, log Z = m + log S, and

        H = −Σ p·log p = log Z − Σ p·x = log S − D / S      with p = exp(x − m) / S.
    """
    starts = range(0, max(1, len(hidden)), options.chunk)
    parts = (slice(start, start + options.chunk) for start in starts)
    return torch.cat([_of_some(hidden[part], weight, labels[part], options, top) for part in parts])


def _of_some(hidden: Tensor, weight: Tensor, labels: Tensor, options: LossOptions, top: int) -> Tensor:
    logits = logits_of(hidden, weight, real=options.real, softcap=options.softcap)
    first, width = options.group.rank() * len(weight), len(weight)
    predicted = label_logits(logits, *own_columns(labels, first=first, width=width))
    largest = logits.amax(1).float()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=options.group)
    sums = [torch.stack(_sums(*piece)) for piece in in_pieces(logits, largest)]
    added = torch.cat([torch.cat(sums, dim=1), predicted[None]])
    dist.all_reduce(added, group=options.group)
    total, weighted, predicted = added.double().unbind()
    normalizer = largest.double() + total.log()
    found = torch.stack([predicted - normalizer, total.log() - weighted / total], dim=1)
    if not top:
        return found
    values, tokens = _likeliest(logits, first, options.group, top)
    return torch.cat([found, values.double() - normalizer[:, None], tokens.double()], dim=1)


def _sums(logits: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return S and D of some positions over this rank's columns. Padding, far below m, adds nothing."""
    below = logits - largest[:, None]
    each = below.exp()
    return each.sum(1), (each * below).sum(1)


def _likeliest(logits: Tensor, first: int, group: dist.ProcessGroup, top: int) -> tuple[Tensor, Tensor]:
    """Return the largest logits and their tokens over all ranks, [T, k] each, largest first."""
    values, columns = logits.float().topk(min(top, logits.shape[1]), dim=1)
    both = torch.stack([values.double(), (columns + first).double()])
    ranks = [torch.empty_like(both) for _ in range(group.size())]
    dist.all_gather(ranks, both, group=group)
    values, tokens = torch.cat(ranks, dim=2)
    chosen, places = values.topk(top, dim=1)
    return chosen, tokens.gather(1, places)
