"""Flags of the runs that several tests compare: models, dropout, half a run."""

from __future__ import annotations

from collections.abc import Sequence

from megavlm.config.cli import parse
from megavlm.config.resolve import resolve
from megavlm.config.schema import Config

QWEN3 = (
    "--vision-activation gelu_tanh --vision-position-embedding learned_rope2d "
    "--vision-position-interpolation bilinear --vision-temporal-patch-size 2 --vision-deepstack-layers 0 2 3 "
    "--vision-num-layers 5 "
    "--projector-hidden-size 128 --language-mrope-section 2 2 2 --language-mrope-interleaved --language-qk-norm"
)


# What the model is and which samples it sees; each is compared with its own run on one process.
MODELS = {
    "plain": "",
    "rich": "--language-tie-embeddings --language-num-query-groups 2 --language-qk-norm --language-add-qkv-bias "
    "--vision-class-token --vision-pre-norm --vision-normalization RMSNorm --vision-activation swiglu "
    "--vision-position-embedding rope2d --vision-qk-norm head --vision-layer-scale --vision-feature-layer -2",
    "frozen-vision": "--freeze vision",
    "frozen-vision-projector": "--freeze vision projector --language-tie-embeddings",
    "frozen-language": "--freeze language --vision-qk-norm full",
    # The first sample of each global batch has images, the others none: with DP 2 and micro-batches of one, rank 1
    # never sees an image, and most micro-batches of rank 0 are text only.
    "one-image-rank": "--imageless-samples 1 2 3 --images-per-sample 1",
    "no-image": "--images-per-sample 0",
    "padded-heads": "--vision-num-attention-heads 3 --vision-hidden-size 36 --language-vocab-size 101",
    "shared-kv": "--language-num-query-groups 1",
    "recompute": "--recompute-granularity full",
    # Windows of 4 patches on grids of 4 and 6; images that turn three ways.
    "qwen2.5-vl": "--vision-normalization RMSNorm --vision-activation swiglu --no-vision-patch-bias "
    "--vision-position-embedding rope2d --vision-temporal-patch-size 2 --vision-window-size 16 "
    "--vision-full-attention-layers 1 --projector-hidden-size 128 --language-mrope-section 1 2 3 "
    "--language-add-qkv-bias --language-num-query-groups 2 --language-tie-embeddings",
    "qwen3-vl": QWEN3,
    # The mergers train in the middle of a tower that does not.
    "qwen3-vl-frozen-vision": f"{QWEN3} --freeze vision --recompute-granularity full",
    "smolvlm": "--projector-kind linear --no-projector-bias --vision-position-interpolation bucket "
    "--language-tie-embeddings",
    # Base tiles and grids of one tile and of 2 × 2, reduced; samples of two images, which are base tiles alone.
    "llava-onevision": "--projector-anyres-max-tiles 2 --image-sizes 16 32 --vision-activation gelu_tanh "
    "--no-vision-post-norm --language-add-qkv-bias --language-num-query-groups 2",
    # Windows of seven tokens, which images of nine and sixteen reach across; the last of three layers has none.
    "gemma3": "--language-num-layers 4 --language-window-size 7 --language-full-attention-layers 2 "
    "--image-token 9 --language-bidirectional-images --language-post-norms --language-apply-layernorm-1p "
    "--language-qk-norm --language-activation geglu --language-softmax-scale 0.2 --language-embedding-scale 8 "
    "--language-rotary-base 1e6 --language-local-rotary-base 100 --language-rope-scaling linear "
    "--language-rope-scaling-factor 8 --language-num-query-groups 2 --language-tie-embeddings --projector-kind linear "
    "--no-projector-bias --projector-merge average --projector-input-norm --projector-normalization RMSNorm "
    "--projector-apply-layernorm-1p",
    # Half of a head rotates by neighbouring channels, a pair each with time, height and width. Patches are normalised
    # before a convolution merges them, as in Mistral 3.
    "glm4v": "--vision-pre-norm --vision-norm-before-position --vision-normalization RMSNorm "
    "--vision-position-embedding learned_rope2d --vision-temporal-patch-size 2 "
    "--no-vision-add-bias-linear --vision-activation swiglu "
    "--projector-kind gated --projector-pixel-shuffle 2 --projector-merge convolution --projector-merge-channels 20 "
    "--projector-merge-bias --projector-input-norm --projector-norm-before-merge --no-projector-bias "
    "--language-mrope-section 1 1 1 --language-rotary-percent 0.5 --language-rotary-interleaved "
    "--language-post-norms --language-add-qkv-bias",
    # Seven heads of four channels, which TP pads; cross-attention in the first and the third layer.
    "qformer": "--projector-kind qformer --projector-pixel-shuffle 1 --qformer-num-queries 5 --qformer-num-layers 3 "
    "--qformer-hidden-size 28 --qformer-num-attention-heads 7 --qformer-ffn-hidden-size 26 "
    "--qformer-norm-epsilon 1e-5 --init-method-std 0.1",  # small weights would hide the gradient of the patches
    # Fourteen query heads in seven groups, and MLPs of 37 and 21 channels, which TP pads.
    "perceiver": "--projector-kind perceiver --projector-pixel-shuffle 1 --perceiver-num-latents 5 "
    "--perceiver-num-layers 2 --perceiver-num-attention-heads 14 --perceiver-num-query-groups 7 "
    "--perceiver-kv-channels 4 --perceiver-ffn-hidden-size 37 --perceiver-projection-ffn-hidden-size 21 "
    "--init-method-std 0.08",
    # Images of sixteen and of thirty-six patches have four tokens each.
    "adaptive-pool": "--projector-kind adaptive_pool --projector-pixel-shuffle 1 --adaptive-pool-factor 3 "
    "--adaptive-pool-hidden-size 27",
    # Images of sixteen and of thirty-six patches have nine tokens each. Fifteen channels, which TP pads.
    "c-abstractor": "--projector-kind c_abstractor --projector-pixel-shuffle 1 --c-abstractor-side 3 "
    "--c-abstractor-depth 2 --c-abstractor-hidden-size 15 --c-abstractor-squeeze-size 5 "
    "--c-abstractor-ffn-hidden-size 27 --init-method-std 0.1",
    "learning-rates": "--vision-lr 1e-3 --projector-lr 5e-3 --weight-decay 0.2 --clip-grad 0.5",
}


# Dropout on: the random state must be restored too, for the same layout to go on bit for bit.
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1".split()


PADDED = (
    "--language-tie-embeddings --language-num-query-groups 2 --vision-num-attention-heads 3 --vision-hidden-size 36"
)


HALF = "--train-iters 2".split()
# A run of four steps and its first half: enough where every bit must agree.
FOUR = "--lr-warmup-iters 1 --train-iters 4".split()
TWO = "--lr-warmup-iters 1 --train-iters 2".split()


def resolved(argv: Sequence[str]) -> Config:
    """Return the configuration of these flags with its defaults filled in, as a run plans and builds with it."""
    return resolve(parse(argv))
