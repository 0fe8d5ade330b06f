"""Published models by name, for planning: their sizes as their `config.json` files give them, and no weights.

Sources: the configurations on the Hugging Face hub of Qwen/Qwen2.5-VL-{3B,7B,72B}-Instruct, Qwen/Qwen3-VL-8B-Instruct,
llava-hf/llava-1.5-{7b,13b}-hf, OpenGVLab/InternVL3-8B-hf and meta-llama/Meta-Llama-3-70B. Text-only models have a tower
of one tiny layer that no image passes.
"""

from __future__ import annotations

from collections.abc import Callable

from megavlm.config.schema import LanguageConfig, ModelConfig, ProjectorConfig, VisionConfig
from megavlm.config.words import did_you_mean, plain
from megavlm.errors import UserError


def _qwen2_5_vl(
    layers: int, hidden: int, ffn: int, heads: int, groups: int, vocabulary: int, tied: bool
) -> ModelConfig:
    return ModelConfig(
        vision=VisionConfig(
            num_layers=32,
            hidden_size=1280,
            ffn_hidden_size=3456 if hidden == 8192 else 3420,
            num_attention_heads=16,
            image_size=448,
            patch_size=14,
            temporal_patch_size=2,
            position_embedding="rope2d",
            normalization="RMSNorm",
            activation="swiglu",
            patch_bias=False,
            window_size=112,
            full_attention_layers=(7, 15, 23, 31),
        ),
        projector=ProjectorConfig(hidden_size=5120, pixel_shuffle=2),
        language=LanguageConfig(
            num_layers=layers,
            hidden_size=hidden,
            ffn_hidden_size=ffn,
            num_attention_heads=heads,
            num_query_groups=groups,
            vocab_size=vocabulary,
            mrope_section=(16, 24, 24),
            add_qkv_bias=True,
            tie_embeddings=tied,
        ),
    )


def qwen2_5_vl_3b() -> ModelConfig:
    return _qwen2_5_vl(36, 2048, 11008, 16, 2, 151936, True)


def qwen2_5_vl_7b() -> ModelConfig:
    return _qwen2_5_vl(28, 3584, 18944, 28, 4, 152064, False)


def qwen2_5_vl_72b() -> ModelConfig:
    return _qwen2_5_vl(80, 8192, 29568, 64, 8, 152064, False)


def qwen3_vl_8b() -> ModelConfig:
    return ModelConfig(
        vision=VisionConfig(
            num_layers=27,
            hidden_size=1152,
            ffn_hidden_size=4304,
            num_attention_heads=16,
            image_size=768,
            patch_size=16,
            temporal_patch_size=2,
            position_embedding="learned_rope2d",
            position_interpolation="bilinear",
            activation="gelu_tanh",
            deepstack_layers=(8, 16, 24),
        ),
        projector=ProjectorConfig(hidden_size=4608, pixel_shuffle=2),
        language=LanguageConfig(
            num_layers=36,
            hidden_size=4096,
            ffn_hidden_size=12288,
            num_attention_heads=32,
            num_query_groups=8,
            kv_channels=128,
            vocab_size=151936,
            mrope_section=(24, 20, 20),
            mrope_interleaved=True,
            qk_norm=True,
        ),
    )


def _llava(layers: int, hidden: int, ffn: int, heads: int) -> ModelConfig:
    return ModelConfig(
        vision=VisionConfig(
            num_layers=24,
            hidden_size=1024,
            ffn_hidden_size=4096,
            num_attention_heads=16,
            image_size=336,
            patch_size=14,
            class_token=True,
            activation="quick_gelu",
            patch_bias=False,
            pre_norm=True,
            feature_layer=-2,
        ),
        language=LanguageConfig(
            num_layers=layers,
            hidden_size=hidden,
            ffn_hidden_size=ffn,
            num_attention_heads=heads,
            vocab_size=32064,
        ),
    )


def llava_1_5_7b() -> ModelConfig:
    return _llava(32, 4096, 11008, 32)


def llava_1_5_13b() -> ModelConfig:
    return _llava(40, 5120, 13824, 40)


def internvl3_8b() -> ModelConfig:
    return ModelConfig(
        vision=VisionConfig(
            num_layers=24,
            hidden_size=1024,
            ffn_hidden_size=4096,
            num_attention_heads=16,
            image_size=448,
            patch_size=14,
            class_token=True,
            layer_scale=True,
            post_norm=False,
        ),
        projector=ProjectorConfig(pixel_shuffle=2, input_norm=True),
        language=LanguageConfig(
            num_layers=28,
            hidden_size=3584,
            ffn_hidden_size=18944,
            num_attention_heads=28,
            num_query_groups=4,
            vocab_size=151674,
            add_qkv_bias=True,
        ),
    )


NO_VISION = VisionConfig(num_layers=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=1, image_size=8)


def llama3_70b() -> ModelConfig:
    return ModelConfig(
        vision=NO_VISION,
        projector=ProjectorConfig(kind="linear"),
        language=LanguageConfig(
            num_layers=80,
            hidden_size=8192,
            ffn_hidden_size=28672,
            num_attention_heads=64,
            num_query_groups=8,
            vocab_size=128256,
        ),
    )


def gpt_7_1b() -> ModelConfig:
    """7.1e9 parameters for the check against Megatron-LM's scaling table: 32 × 4096 and its vocabulary of 131,072.

    GPT's MLP has two matrices of 4·H; ours has three: 8/3·H is as much work and as many weights.
    """
    return ModelConfig(
        vision=NO_VISION,
        projector=ProjectorConfig(kind="linear"),
        language=LanguageConfig(
            num_layers=32,
            hidden_size=4096,
            ffn_hidden_size=10912,
            num_attention_heads=32,
            vocab_size=131072,
            tie_embeddings=True,
        ),
    )


MODELS: dict[str, Callable[[], ModelConfig]] = {
    function.__name__: function
    for function in (
        qwen2_5_vl_3b,
        qwen2_5_vl_7b,
        qwen2_5_vl_72b,
        qwen3_vl_8b,
        llava_1_5_7b,
        llava_1_5_13b,
        internvl3_8b,
        llama3_70b,
        gpt_7_1b,
    )
}


def model(name: str) -> ModelConfig:
    """The sizes of a published model. Raises UserError, with a suggestion, for a name that is not known."""
    if name not in MODELS:
        hint = did_you_mean(name, MODELS) or f": choose one of {', '.join(MODELS)}, or --config or --hf"
        raise UserError(f"--model {plain(name)} is not known{hint}")
    return MODELS[name]()
