"""Flags of the runs that several tests compare: models, dropout, half a run."""

from __future__ import annotations

from collections.abc import Sequence

from megavlm.command_line.parsing import parse
from megavlm.config.schema import Config
from megavlm.rules.defaults import resolve

QWEN3 = (
    "--set model.vision.activation=gelu_tanh model.vision.position_embedding=learned_rope2d "
    "model.vision.position_interpolation=bilinear model.vision.temporal_patch_size=2 "
    "model.vision.deepstack_layers=[0,2,3] model.vision.num_layers=5 model.projector.hidden_size=128 "
    "model.language.mrope_section=[2,2,2] model.language.mrope_interleaved=true model.language.qk_norm=true"
)


# What the model is and which samples it sees; each is compared with its own run on one process.
MODELS = {
    "plain": "",
    "rich": "--set model.language.tie_embeddings=true model.language.num_query_groups=2 model.language.qk_norm=true "
    "model.language.add_qkv_bias=true model.vision.class_token=true model.vision.pre_norm=true "
    "model.vision.normalization=RMSNorm model.vision.activation=swiglu model.vision.position_embedding=rope2d "
    "model.vision.qk_norm=head model.vision.layer_scale=true model.vision.feature_layer=-2",
    "frozen-vision": "--freeze vision",
    "frozen-vision-projector": "--freeze vision projector --set model.language.tie_embeddings=true",
    "frozen-language": "--freeze language --set model.vision.qk_norm=full",
    # The first sample of each global batch has images, the others none: with DP 2 and micro-batches of one, rank 1
    # never sees an image, and most micro-batches of rank 0 are text only.
    "one-image-rank": "--set data.imageless_samples=[1,2,3] --images-per-sample 1",
    "no-image": "--images-per-sample 0",
    "padded-heads": "--set model.vision.num_attention_heads=3 model.vision.hidden_size=36 "
    "model.language.vocab_size=101",
    "shared-kv": "--set model.language.num_query_groups=1",
    "recompute": "--recompute-granularity full",
    # Windows of 4 patches on grids of 4 and 6; images that turn three ways.
    "qwen2.5-vl": "--set model.vision.normalization=RMSNorm model.vision.activation=swiglu "
    "model.vision.patch_bias=false model.vision.position_embedding=rope2d model.vision.temporal_patch_size=2 "
    "model.vision.window_size=16 model.vision.full_attention_layers=[1] model.projector.hidden_size=128 "
    "model.language.mrope_section=[1,2,3] model.language.add_qkv_bias=true model.language.num_query_groups=2 "
    "model.language.tie_embeddings=true",
    "qwen3-vl": QWEN3,
    # The mergers train in the middle of a tower that does not.
    "qwen3-vl-frozen-vision": f"{QWEN3} --freeze vision --recompute-granularity full",
    "smolvlm": "--projector-kind linear --set model.projector.bias=false model.vision.position_interpolation=bucket "
    "model.language.tie_embeddings=true",
    # Base tiles and grids of one tile and of 2 × 2, reduced; samples of two images, which are base tiles alone.
    "llava-onevision": "--set model.projector.anyres_max_tiles=2 --image-sizes 16 32 --set "
    "model.vision.activation=gelu_tanh model.vision.post_norm=false model.language.add_qkv_bias=true "
    "model.language.num_query_groups=2",
    # Windows of seven tokens, which images of nine and sixteen reach across; the last of three layers has none.
    "gemma3": "--set model.language.num_layers=4 model.language.window_size=7 model.language.full_attention_layers=[2] "
    "--image-token 9 --set model.language.bidirectional_images=true model.language.post_norms=true "
    "model.language.apply_layernorm_1p=true model.language.qk_norm=true model.language.activation=geglu "
    "model.language.softmax_scale=0.2 model.language.embedding_scale=8 model.language.rotary_base=1e6 "
    "model.language.local_rotary_base=100 model.language.rope_scaling=linear "
    "model.language.rope_scaling_factor=8 model.language.num_query_groups=2 model.language.tie_embeddings=true "
    "--projector-kind linear --set model.projector.bias=false model.projector.merge=average "
    "model.projector.input_norm=true model.projector.normalization=RMSNorm "
    "model.projector.apply_layernorm_1p=true",
    # Layers without a window have wider and fewer key heads, which are values; images attend both ways in the others.
    # A tower with learned columns and rows, whose features are standardized.
    "gemma4": "--set model.language.window_size=7 model.language.full_attention_layers=[1,3] "
    "model.language.kv_channels=10 model.language.num_query_groups=4 model.language.global_kv_channels=16 "
    "model.language.global_query_groups=2 model.language.keys_as_values=true model.language.value_norm=true "
    "model.language.layer_scalar=true model.language.qk_norm=true model.language.post_norms=true "
    "model.language.rope_scaling=proportional model.language.rotary_percent=0.375 "
    "model.language.local_rotary_base=100 model.language.softmax_scale=0.3 model.language.final_softcap=1.5 "
    "model.language.bidirectional_windows=true model.language.embedding_scale=8 "
    "model.language.tie_embeddings=true --image-token 9 --set "
    "model.vision.position_embedding=axes_rope2d model.vision.axis_positions=8 model.vision.qk_norm=head_and_values "
    "model.vision.post_norms=true model.vision.softmax_scale=0.4 model.vision.activation=geglu "
    "model.vision.normalization=RMSNorm --projector-kind linear --set model.projector.bias=false "
    "model.projector.merge=standardized_average model.projector.input_norm=true "
    "model.projector.normalization=UnitRMSNorm "
    # Norms of small outputs would multiply rounding.
    "--init-method-std 0.2",
    # Prompts that reach beyond windows of seven tokens, bounded scores and logits.
    "paligemma": "--set model.language.window_size=7 model.language.full_attention_layers=[1,3] "
    "model.language.bidirectional_prefix=true model.language.post_norms=true model.language.attention_softcap=0.5 "
    "model.language.final_softcap=1.5 model.language.apply_layernorm_1p=true model.language.activation=geglu "
    "model.language.num_query_groups=2 model.language.tie_embeddings=true --init-method-std 0.1 "
    "--projector-kind linear",
    # Half of a head rotates by neighbouring channels, a pair each with time, height and width. Patches are normalised
    # before a convolution merges them, as in Mistral 3.
    "glm4v": "--set model.vision.pre_norm=true model.vision.norm_before_position=true "
    "model.vision.normalization=RMSNorm model.vision.position_embedding=learned_rope2d "
    "model.vision.temporal_patch_size=2 model.vision.add_bias_linear=false model.vision.activation=swiglu "
    "--projector-kind gated --set model.projector.pixel_shuffle=2 model.projector.merge=convolution "
    "model.projector.merge_channels=20 model.projector.merge_bias=true model.projector.input_norm=true "
    "model.projector.norm_before_merge=true model.projector.bias=false model.language.mrope_section=[1,1,1] "
    "model.language.rotary_percent=0.5 model.language.rotary_interleaved=true model.language.post_norms=true "
    "model.language.add_qkv_bias=true",
    # Norms of outputs alone; layers of which two have a window and rotate. Two key/value heads of a tower of eight.
    "exaone4.5": "--set model.language.input_norms=false model.language.post_norms=true model.language.qk_norm=true "
    "model.language.window_size=7 model.language.full_attention_layers=[1,3] model.language.no_rope_layers=[1,3] "
    "model.language.num_query_groups=2 model.vision.num_query_groups=2 model.vision.position_embedding=rope2d "
    "model.vision.qk_norm=head model.vision.normalization=RMSNorm model.vision.activation=swiglu "
    # Norms of small outputs would multiply rounding.
    "--init-method-std 0.2",
    # Attention and MLP read one norm, without a bias; layers of which two have a window and rotate neighbours. A SwiGLU
    # projector of 37 channels, which TP pads.
    "cohere": "--set model.language.parallel_block=true model.language.normalization=LayerNorm "
    "model.language.logit_scale=0.3 model.language.window_size=7 model.language.full_attention_layers=[1,3] "
    "model.language.no_rope_layers=[1,3] model.language.rotary_interleaved=true model.language.num_query_groups=2 "
    "model.language.tie_embeddings=true --projector-kind swiglu --set model.projector.pixel_shuffle=2 "
    "model.projector.hidden_size=37 model.projector.input_norm=true",
    # Grids of 4 and 8 patches a side become 2 and 4 behind the second layer; seven heads and an MLP that TP pads.
    "minicpm-v": "--image-sizes 16 32 --set model.vision.patch_size=4 model.vision.merger_layer=1 "
    "model.vision.position_interpolation=fraction model.vision.activation=gelu_tanh model.vision.hidden_size=28 "
    "model.vision.num_attention_heads=7 model.vision.ffn_hidden_size=45 model.projector.pixel_shuffle=4 "
    "model.projector.input_norm=true model.projector.hidden_size=112",
    # Two key heads for six value heads, which TP 4 shares; a gate on softmax attention, which half of a head rotates.
    # One layer predicts a further token.
    "qwen3.5": "--set model.language.linear_attention_layers=[0,2] model.language.linear_num_key_heads=2 "
    "model.language.linear_num_value_heads=6 model.language.linear_key_head_dim=10 "
    "model.language.linear_value_head_dim=12 model.language.linear_conv_kernel_dim=3 "
    "model.language.attention_output_gate=true model.language.qk_norm=true model.language.apply_layernorm_1p=true "
    "model.language.num_query_groups=2 model.language.rotary_percent=0.5 model.language.mtp_layers=1",
    # Queries of sixteen channels, of which the last six rotate; six heads, which four ranks do not divide.
    "latents": "--set model.language.num_attention_heads=6 model.language.num_query_groups=6 "
    "model.language.kv_channels=16 "
    "model.language.kv_lora_rank=20 model.language.q_lora_rank=24 model.language.qk_pos_emb_head_dim=6 "
    "model.language.v_head_dim=10 model.language.rotary_interleaved=true model.language.rope_attention_factor=1.2 "
    "model.language.softmax_scale=0.3",
    # Sounds of chunks of six frames, of some samples; five heads and an MLP that TP pads.
    "audio": "--set model.audio.num_layers=2 model.audio.hidden_size=20 model.audio.ffn_hidden_size=35 "
    "model.audio.num_attention_heads=5 model.audio.mel_bins=12 model.audio.chunk_frames=6 model.audio_token=95 "
    "data.sound_frames=[9,0,17,4]",
    # Two layers predict further tokens, under positions of images that turn three ways, from a shared embedding.
    "mtp": "--set model.language.mtp_layers=2 model.language.mrope_section=[2,2,2] model.language.num_layers=3 "
    "model.language.tie_embeddings=true model.objective.mtp_loss_scaling_factor=0.7",
    # Seven heads of four channels, which TP pads; cross-attention in the first and the third layer.
    "qformer": "--projector-kind qformer --set model.projector.pixel_shuffle=1 "
    "model.projector.connectors.qformer.num_queries=5 model.projector.connectors.qformer.num_layers=3 "
    "model.projector.connectors.qformer.hidden_size=28 model.projector.connectors.qformer.num_attention_heads=7 "
    "model.projector.connectors.qformer.ffn_hidden_size=26 "
    # Small weights would hide the gradient of the patches.
    "--set model.projector.connectors.qformer.norm_epsilon=1e-5 --init-method-std 0.1",
    # Fourteen query heads in seven groups, and MLPs of 37 and 21 channels, which TP pads.
    "perceiver": "--projector-kind perceiver --set model.projector.pixel_shuffle=1 "
    "model.projector.connectors.perceiver.num_latents=5 model.projector.connectors.perceiver.num_layers=2 "
    "model.projector.connectors.perceiver.num_attention_heads=14 "
    "model.projector.connectors.perceiver.num_query_groups=7 model.projector.connectors.perceiver.kv_channels=4 "
    "model.projector.connectors.perceiver.ffn_hidden_size=37 "
    "model.projector.connectors.perceiver.projection_ffn_hidden_size=21 --init-method-std 0.08",
    # Images of sixteen and of thirty-six patches have four tokens each.
    "adaptive-pool": "--projector-kind adaptive_pool --set model.projector.pixel_shuffle=1 "
    "model.projector.connectors.adaptive_pool.factor=3 model.projector.connectors.adaptive_pool.hidden_size=27",
    # Images of sixteen and of thirty-six patches have nine tokens each. Fifteen channels, which TP pads.
    "c-abstractor": "--projector-kind c_abstractor --set model.projector.pixel_shuffle=1 "
    "model.projector.connectors.c_abstractor.side=3 model.projector.connectors.c_abstractor.depth=2 "
    "model.projector.connectors.c_abstractor.hidden_size=15 model.projector.connectors.c_abstractor.squeeze_size=5 "
    "model.projector.connectors.c_abstractor.ffn_hidden_size=27 --init-method-std 0.1",
    "learning-rates": "--vision-lr 1e-3 --projector-lr 5e-3 --weight-decay 0.2 --clip-grad 0.5",
}


# Dropout on: the random state must be restored too, for the same layout to go on bit for bit.
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1".split()


PADDED = (
    "--set model.language.tie_embeddings=true model.language.num_query_groups=2 model.vision.num_attention_heads=3 "
    "model.vision.hidden_size=36"
)


HALF = "--train-iters 2".split()
# A run of four steps and its first half: enough where every bit must agree.
FOUR = "--lr-warmup-iters 1 --train-iters 4".split()
TWO = "--lr-warmup-iters 1 --train-iters 2".split()


def resolved(argv: Sequence[str]) -> Config:
    """Return the configuration of these flags with its defaults filled in, as a run plans and builds with it."""
    return resolve(parse(argv))
