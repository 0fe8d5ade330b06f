"""What users get wrong: every mistake is refused in one line that names the option and the remedy.

Rule mistakes also carry the flags that follow the remedy, and these must satisfy `check`: advice has to work.
"""

from __future__ import annotations

import ast
import functools
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from megavlm import rules
from megavlm.command_line import parsing
from megavlm.command_line.parsing import parse
from megavlm.command_line.words import RUN_FLAGS
from megavlm.errors import UserError
from megavlm.programs.sweep.grid import check_variants, read_grid, variants_of
from megavlm.rules.check import RULES, check
from megavlm.rules.defaults import with_start_defaults
from megavlm.rules.fields import Option, options, value_at, with_values
from megavlm.rules.layout_rules import WORLD_RULES
from megavlm.rules.load import from_dict
from tests.support.remedies import KEY, answer, dead_end, followed, followed_in_file


class Mistake(NamedTuple):
    argv: str
    names: str  # the option, in the message
    remedy: str  # a piece of the message
    fix: str | None = None  # flags that follow the advice; appended, so that they override
    world: int = 1


def _of_table() -> dict[str, list[Mistake]]:
    """Return the mistakes of `mistakes.txt` by section."""
    found: dict[str, list[Mistake]] = {}
    for line in Path(__file__).with_name("mistakes.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            rows = found.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            argv, names, remedy, *more = line.split(" | ")
            rows.append(Mistake(argv, names, remedy, *more[:1], *map(int, more[1:])))
    return found


RANGES = (
    Mistake("--tp 0", "--tensor-model-parallel-size 0", "at least 1", "--tp 1"),
    Mistake("--vpp 0", "--virtual-pipeline-model-parallel-size 0", "at least 1", "--vpp 1"),
    Mistake("--cp 0", "--context-parallel-size 0", "at least 1", "--cp 1"),
    Mistake("--num-experts 1", "--num-experts 1", "0, or at least 2", "--num-experts 2"),
    Mistake("--mbs -1", "--micro-batch-size -1", "at least 1", "--mbs 1"),
    Mistake(
        "--set model.vision.num_attention_heads=0",
        "model.vision.num_attention_heads 0",
        "at least 1",
        "--set model.vision.num_attention_heads=1",
    ),
    Mistake(
        "--set model.projector.pixel_shuffle=0",
        "model.projector.pixel_shuffle 0",
        "at least 1",
        "--set model.projector.pixel_shuffle=1",
    ),
    Mistake("--train-iters 0", "--train-iters 0", "at least 1", "--train-iters 1"),
    Mistake("--gbs 1000000000000", "--global-batch-size 1000000000000", "from 1 to 1,048,576", "--gbs 8"),
    Mistake("--epochs 0 --datasets a.json", "--epochs 0", "greater than 0", "--epochs 0.5"),
    Mistake("--lr 0", "--lr 0.0", "greater than 0", "--lr 1e-9"),
    Mistake(
        "--qk-clip --set optimizer.qk_clip_threshold=0",
        "optimizer.qk_clip_threshold 0",
        "greater than 0",
        "--set optimizer.qk_clip_threshold=9",
    ),
    Mistake("--lr -1e-4", "--lr -0.0001", "greater than 0", "--lr 1e-4"),
    Mistake("--projector-lr -1", "--projector-lr -1.0", "at least 0", "--projector-lr 0"),
    Mistake("--adam-beta2 1", "--adam-beta2 1.0", "less than 1", "--adam-beta2 0.999"),
    Mistake("--objective contrastive --temperature 0", "--temperature 0.0", "greater than 0", "--temperature 0.02"),
    Mistake("--hidden-dropout 1", "--hidden-dropout 1.0", "less than 1", "--hidden-dropout 0.5"),
    Mistake("--clip-grad -1", "--clip-grad -1.0", "at least 0", "--clip-grad 0"),
    Mistake(
        "--set data.imageless_share=1.5", "data.imageless_share 1.5", "between 0 and 1", "--set data.imageless_share=1"
    ),
    Mistake(
        "--set data.answer_share=0",
        "data.answer_share 0.0",
        "greater than 0 and at most 1",
        "--set data.answer_share=1",
    ),
    Mistake("--images-per-sample 1 -1", "--images-per-sample -1", "from 0 to 10,000", "--images-per-sample 1 0"),
    Mistake("--image-sizes 32 0", "--image-sizes 0", "at least 1", "--image-sizes 32"),
    Mistake("--save-interval -5", "--save-interval -5", "at least 0", "--save-interval 0"),
    Mistake("--keep-checkpoints -1", "--keep-checkpoints -1", "at least 0", "--keep-checkpoints 0"),
    Mistake("--eval-interval -1", "--eval-interval -1", "at least 0", "--eval-interval none"),
    Mistake("--sample-interval -1", "--sample-interval -1", "at least 0", "--sample-interval 0"),
    Mistake(
        "--set evaluation.sample_count=0", "evaluation.sample_count 0", "at least 1", "--set evaluation.sample_count=8"
    ),
    Mistake("--log-interval 0", "--log-interval 0", "at least 1", "--log-interval 1"),
    Mistake(
        "--distributed-timeout-minutes 0",
        "--distributed-timeout-minutes 0.0",
        "greater than 0",
        "--distributed-timeout-minutes 1",
    ),
    Mistake(
        "--projector-kind c_abstractor --set model.projector.connectors.c_abstractor.depth=0",
        "model.projector.connectors.c_abstractor.depth 0",
        "at least 1",
        "--set model.projector.connectors.c_abstractor.depth=1",
    ),
    Mistake("--seed -1", "--seed -1", "between 0 and 2**32", "--seed 0"),
)

MODEL = (
    Mistake(
        "--projector-kind qformer --set model.language.mrope_section=[3,3,2]",
        "--projector-kind qformer",
        "leave one out",
        "--projector-kind mlp",
    ),
    Mistake(
        "--projector-kind adaptive_pool --set model.projector.connectors.adaptive_pool.side=4 "
        "model.projector.connectors.adaptive_pool.factor=2",
        "model.projector.connectors.adaptive_pool.side",
        "leave one of them out",
        "--set model.projector.connectors.adaptive_pool.factor=null",
    ),
    Mistake(
        "--projector-kind perceiver --set model.projector.connectors.perceiver.num_query_groups=3",
        "model.projector.connectors.perceiver.num_query_groups 3",
        "use 16, 8, 4",
        "--set model.projector.connectors.perceiver.num_query_groups=4",
    ),
    Mistake(
        "--projector-kind qformer --set model.projector.connectors.qformer.num_attention_heads=5",
        "model.projector.connectors.qformer.num_attention_heads 5",
        "use 256, 192",
        "--set model.projector.connectors.qformer.num_attention_heads=192",
    ),
    Mistake(
        "--projector-kind c_abstractor --set model.projector.connectors.c_abstractor.hidden_size=5 --tp 4",
        "--tensor-model-parallel-size 4",
        "before.0.conv1.weight of --projector-kind c_abstractor: use 3",
        "--set model.projector.connectors.c_abstractor.hidden_size=7",
        world=4,
    ),
    Mistake(
        "--set model.vision.hidden_size=130",
        "model.vision.num_attention_heads 8",
        "use 128 or 136",
        "--set model.vision.hidden_size=136",
    ),
    Mistake(
        "--set model.vision.position_embedding=rope2d model.vision.hidden_size=120",
        "model.vision.position_embedding rope2d",
        "divisible by 4",
        "--set model.vision.hidden_size=128",
    ),
    Mistake(
        "--set model.language.hidden_size=130",
        "model.language.hidden_size 130",
        "set model.language.kv_channels",
        "--set model.language.kv_channels=32",
    ),
    Mistake(
        "--set model.language.kv_channels=33",
        "model.language.kv_channels 33",
        "add or subtract 1",
        "--set model.language.kv_channels=34",
    ),
    Mistake(
        "--set model.language.hidden_size=136",
        "model.language.hidden_size 136",
        "even head width",
        "--set model.language.hidden_size=144",
    ),
    Mistake(
        "--set model.language.num_query_groups=3",
        "model.language.num_query_groups 3",
        "use 8, 4, 2 or 1",
        "--set model.language.num_query_groups=2",
    ),
    Mistake(
        "--set model.language.rope_scaling=llama3 model.language.rope_high_freq_factor=1",
        "model.language.rope_high_freq_factor 1.0",
        "must be above",
        "--set model.language.rope_high_freq_factor=4",
    ),
    Mistake(
        "--set model.language.rope_scaling=yarn model.language.rope_beta_slow=32",
        "model.language.rope_beta_fast 32.0",
        "must be above",
        "--set model.language.rope_beta_slow=1",
    ),
    Mistake(
        "--init-from m --set model.language.max_positions=48 model.language.rope_scaling=yarn "
        "model.language.rope_original_positions=48 "
        "--seq-length 64",
        "--seq-length 64",
        "not where llama_4_scaling_beta is set",
        "--seq-length 48",
    ),
    Mistake(
        "--set model.language.rotary_interleaved=true model.language.rotary_percent=0.01",
        "model.language.rotary_percent 0.01",
        "another share",
        "--set model.language.rotary_percent=0.5",
    ),
    Mistake("--set model.language.max_positions=32", "--seq-length 64", "lower it", "--seq-length 32"),
    Mistake(
        "--set model.language.max_positions=48 --seq-length 64",
        "--seq-length 64",
        "or add --set model.language.max_positions=null",
        "--set model.language.max_positions=null",
    ),
    Mistake(
        "--language-from llama --set model.language.max_positions=48 --seq-length 64",
        "--seq-length 64",
        "raise max_position_embeddings (and sliding_window, if it is less) in llama/config.json",
        "--seq-length 48",
    ),
    Mistake(
        "--init-from gemma --set model.language.max_positions=48 --seq-length 64 --set model.language.window_size=8",
        "--seq-length 64",
        "raise max_position_embeddings in gemma/config.json",
        "--seq-length 48",
    ),
    Mistake(
        "--set model.language.mrope_section=[4,8]",
        "model.language.mrope_section 4 8",
        "add up to 8",
        "--set model.language.mrope_section=[4,2,2]",
    ),
    Mistake(
        "--set model.language.mrope_section=[8,8,8] model.language.kv_channels=40",
        "model.language.mrope_section 8 8 8",
        "add up to 20",
        "--set model.language.kv_channels=48",
    ),
    Mistake(
        "--set model.language.mrope_interleaved=true",
        "model.language.mrope_interleaved",
        "add --set model.language.mrope_section",
        "--set model.language.mrope_section=[3,3,2]",
    ),
    Mistake(
        "--set model.vision.window_size=15 model.projector.pixel_shuffle=2",
        "model.vision.window_size 15",
        "at least model.vision.patch_size 8 × model.projector.pixel_shuffle 2",
        "--set model.vision.window_size=16",
    ),
    Mistake(
        "--set model.vision.window_size=16 model.vision.class_token=true",
        "model.vision.class_token",
        "cannot be combined",
        "--set model.vision.class_token=false",
    ),
    Mistake(
        "--set model.vision.full_attention_layers=[1]",
        "model.vision.full_attention_layers",
        "add --set model.vision.window_size",
        "--set model.vision.window_size=16",
    ),
    Mistake(
        "--set model.vision.deepstack_layers=[1,0]",
        "model.vision.deepstack_layers 1 0",
        "must be in ascending order",
        "--set model.vision.deepstack_layers=[0,1]",
    ),
    Mistake(
        "--set model.vision.deepstack_layers=[1,3] model.vision.feature_layer=-2",
        "model.vision.deepstack_layers 1 3",
        "layers that run, 0 to 2",
        "--set model.vision.deepstack_layers=[1,2]",
    ),
    Mistake(
        "--set model.vision.deepstack_layers=[0,1,2] model.language.num_layers=2",
        "model.vision.deepstack_layers 0 1 2",
        "list fewer",
        "--set model.vision.deepstack_layers=[0,2]",
    ),
    Mistake(
        "--set model.language.window_size=8 model.language.full_attention_layers=[1,9]",
        "model.language.full_attention_layers 1 9",
        "0 to 3",
        "--set model.language.full_attention_layers=[1]",
    ),
    Mistake(
        "--set model.language.bidirectional_images=true",
        "model.language.bidirectional_images",
        "add --image-token",
        "--image-token 9",
    ),
    Mistake(
        "--compress-gradients fp8 --precision fp16", "--compress-gradients fp8", "--precision bf16", "--precision bf16"
    ),
    Mistake(
        "--compress-weights int8 --precision bf16 --num-experts 4",
        "--compress-weights int8 does not support --num-experts",
        "leave it out",
        "--compress-weights none",
    ),
    Mistake(
        "--compress-weights int8 --precision bf16 --data-parallel-sharding none",
        "--compress-weights int8 has no weights to gather",
        "use optimizer",
        "--data-parallel-sharding optimizer",
    ),
    Mistake(
        "--set parallel.compress_error_feedback=false",
        "parallel.compress_error_feedback=false",
        "add it",
        "--compress-gradients int8",
    ),
    Mistake(
        "--set parallel.compress_group_size=1", "parallel.compress_group_size 1", "add it", "--compress-gradients int8"
    ),
    Mistake(
        "--compress-gradients int8 --set parallel.compress_group_size=1 --data-parallel-sharding none",
        "parallel.compress_group_size 1",
        "leave one out",
        "--data-parallel-sharding optimizer",
    ),
    Mistake("--compress-weights fp8", "--compress-weights fp8", "--precision bf16", "--precision bf16"),
    Mistake("--offload optimiser", "--offload optimiser", "choose optimizer, activations", "--offload optimizer"),
    Mistake("--offload activations=nvme:/x", "--offload activations=nvme:/x", "choose", "--offload optimizer=nvme:/x"),
    Mistake("--offload optimizer=/x", "--offload optimizer=/x", "optimizer=nvme:DIR", "--offload optimizer=nvme:/x"),
    Mistake("--offload optimizer=nvme:", "--offload optimizer=nvme:", "names no folder", "--offload optimizer=nvme:x"),
    Mistake("--offload optimizer optimizer=nvme:/x", "--offload", "twice", "--offload optimizer=nvme:/x"),
    Mistake(
        "--offload optimizer parameters",
        "--offload parameters",
        "needs --data-parallel-sharding full",
        "--data-parallel-sharding full",
    ),
    Mistake(
        "--offload parameters --data-parallel-sharding full",
        "--offload parameters",
        "use --offload optimizer parameters",
        "--offload optimizer parameters",
    ),
    Mistake("--offload parameters=nvme:/x", "--offload parameters=nvme:/x", "choose", "--offload optimizer=nvme:/x"),
    Mistake(
        "--set model.projector.anyres_max_tiles=4 model.vision.deepstack_layers=[0]",
        "model.projector.anyres_max_tiles and model.vision.deepstack_layers",
        "leave one of them out",
        "--set model.projector.anyres_max_tiles=null",
    ),
    Mistake(
        "--set model.projector.anyres_max_tiles=4 model.language.mrope_section=[3,3,2]",
        "model.projector.anyres_max_tiles and model.language.mrope_section",
        "leave one of them out",
        "--set model.projector.anyres_max_tiles=null",
    ),
    Mistake(
        "--set model.projector.anyres_max_tiles=4 --data digits",
        "--data digits has no tiled images",
        "use --data synthetic",
        "--data synthetic",
    ),
    Mistake(
        "--set model.projector.anyres_max_tiles=4 --image-sizes 32 48",
        "--image-sizes 48 is not a multiple of model.vision.image_size 32",
        "use 32 or 64",
        "--image-sizes 32 64",
    ),
    Mistake("--lora-rank 4 --lora-targets w_q", "--lora-targets w_q", "try language", "--lora-targets q_proj"),
    Mistake("--lora-rank 4 --lora-targets q_proj,v_proj", "is one name", "write spaces", "--lora-targets q_proj"),
    Mistake("--lora-rank 4 --freeze language", "--freeze language", "remove language from --freeze", "--freeze vision"),
    Mistake(
        "--set model.vision.feature_layer=0",
        "model.vision.feature_layer 0",
        "between -1",
        "--set model.vision.feature_layer=-1",
    ),
    Mistake(
        "--set model.vision.feature_layer=-5",
        "model.vision.feature_layer -5",
        "and -4",
        "--set model.vision.feature_layer=-4",
    ),
    Mistake(
        "--set model.vision.image_size=36",
        "model.vision.image_size 36",
        "use 32 or 40",
        "--set model.vision.image_size=40",
    ),
    Mistake("--set model.vision.image_size=4", "model.vision.image_size 4", "use 8", "--set model.vision.image_size=8"),
    Mistake(
        "--set model.vision.image_size=40 model.projector.pixel_shuffle=2",
        "model.vision.image_size 40 is 5 patches",
        "use 32 or 48",
        "--set model.vision.image_size=48",
    ),
    Mistake("--image-sizes 32 20", "--image-sizes 20", "use 16 or 24", "--image-sizes 32 16"),
    Mistake(
        "--image-sizes 24 --set model.projector.pixel_shuffle=2", "--image-sizes 24", "use 16 or 32", "--image-sizes 16"
    ),
    Mistake("--freeze vision language projector", "--freeze", "remove one of them", "--freeze vision language"),
)

LAYOUT = (
    Mistake(
        "--tp 4 --set model.projector.hidden_size=2",
        "model.projector.hidden_size 2",
        "use 4",
        "--set model.projector.hidden_size=4",
        4,
    ),
    Mistake("--sp", "--sequence-parallel", "leave --sequence-parallel out", "--sp none"),
    Mistake("--tp 4 --seq-length 66", "--seq-length 66", "use 64 or 68, or give --no-sequence-parallel", "--no-sp", 4),
    Mistake(
        "--vpp 2",
        "--virtual-pipeline-model-parallel-size 2",
        "--pipeline-model-parallel-size is 1: raise it",
        "--pp 2",
        2,
    ),
    Mistake("--schedule gpipe", "--schedule gpipe", "use --pp 2", "--pp 2", 2),
    Mistake("--pp 2 --schedule interleaved", "--schedule interleaved", "add --vpp 2", "--vpp 2", 2),
    Mistake("--pp 2 --vpp 2 --schedule zb-h1", "--schedule zb-h1", "use --vpp 1", "--vpp 1", 2),
    Mistake(
        "--pp 2 --schedule zb-h1 --data-parallel-sharding full",
        "--schedule zb-h1",
        "use --data-parallel-sharding optimizer",
        "--data-parallel-sharding optimizer",
        2,
    ),
    Mistake("--cp 3 --cp-comm-type a2a", "--context-parallel-size 3", "the 8 query heads of a rank", "--cp 4", 4),
    Mistake("--cp 8 --tp 2 --cp-comm-type a2a", "--context-parallel-size 8", "set it to 4, 2 or 1", "--cp 4", 8),
    Mistake("--cp 3", "--seq-length 64", "use 60 or 66", "--seq-length 66", 3),
    Mistake(
        "--cp 2 --cp-comm-type all_gather --set model.language.window_size=8",
        "--context-parallel-size 2 gathers keys",
        "with --cp-comm-type a2a",
        "--cp-comm-type a2a",
        2,
    ),
    Mistake("--cp 4 --seq-length 66", "--seq-length 66", "use 64 or 68", "--seq-length 68", 4),
    Mistake("--cp 2 --tp 2 --seq-length 66", "--seq-length 66", "use 64 or 68", "--no-sp", 4),
    Mistake(
        "--encode-ahead --freeze vision projector",
        "--encode-ahead",
        "add --placement colocated",
        "--placement colocated",
    ),
    Mistake(
        "--vision-cache x --placement colocated --freeze vision",
        "--vision-cache",
        "--freeze vision projector",
        "--freeze vision projector",
    ),
    Mistake(
        "--encode-ahead --placement colocated --freeze vision projector --hidden-dropout 0.1",
        "--encode-ahead",
        "--hidden-dropout and --attention-dropout",
        "--hidden-dropout 0 --attention-dropout 0",
    ),
    Mistake(
        "--lora-rank 4 --set model.vision.feature_layer=-2 --lora-targets vision.layers.3",
        "--lora-targets vision.layers.3",
        "uses the output of layer 2",
        "--lora-targets vision.layers.2",
    ),
    Mistake("--vision-tp 2 --tp 2", "--vision-tp 2", "add --placement colocated", "--placement colocated", 2),
    Mistake(
        "--vision-tp 3 --placement colocated --tp 2 --pp 2",
        "--vision-tp 3",
        "set --vision-tp to 4, 2 or 1",
        "--vision-tp 4",
        4,
    ),
    Mistake(
        "--vision-tp 2 --placement colocated --tp 2 --freeze vision projector --encode-ahead",
        "--encode-ahead",
        "leave one of them out",
        "--no-encode-ahead",
        2,
    ),
    Mistake(
        "--vision-tp 2 --placement colocated --pp 2 --set model.vision.ffn_hidden_size=1",
        "too small for --vision-tp 2",
        "use 2",
        "--set model.vision.ffn_hidden_size=33",
        2,
    ),
    Mistake(
        "--overlap-param-gather --no-overlap-grad-reduce",
        "--overlap-param-gather",
        "leave --no-overlap-grad-reduce out",
        "--overlap-grad-reduce",
    ),
    Mistake(
        "--overlap-param-gather --overlap-grad-reduce --data-parallel-sharding none",
        "--overlap-param-gather",
        "needs --data-parallel-sharding optimizer",
        "--data-parallel-sharding optimizer",
    ),
    Mistake(
        "--overlap-grad-reduce --data-parallel-sharding full",
        "--overlap-grad-reduce",
        "leave it out",
        "--no-overlap-grad-reduce",
    ),
    Mistake(
        "--precision fp16 --data-parallel-sharding optimizer_gradients",
        "--data-parallel-sharding optimizer_gradients",
        "use --precision bf16",
        "--precision bf16",
    ),
    Mistake(
        "--hybrid-shard-size 2 --data-parallel-sharding none",
        "--hybrid-shard-size 2",
        "choose another sharding",
        "--data-parallel-sharding full",
        2,
    ),
    Mistake(
        "--hybrid-shard-size 2 --placement colocated",
        "--hybrid-shard-size",
        "use --placement stages",
        "--placement stages",
        2,
    ),
    Mistake(
        "--set parallel.ddp_bucket_size=1000 --data-parallel-sharding full",
        "parallel.ddp_bucket_size 1000",
        "leave it out",
        "--data-parallel-sharding optimizer",
        2,
    ),
    Mistake(
        "--compress-gradients int8 --set parallel.compress_group_size=3",
        "parallel.compress_group_size 3",
        "use 4, 2 or 1",
        "--set parallel.compress_group_size=2",
        4,
    ),
    Mistake("--hybrid-shard-size 3", "--hybrid-shard-size 3", "use 4, 2 or 1", "--hybrid-shard-size 2", 4),
    Mistake(
        "--secondary-shard-size 2",
        "--secondary-shard-size 2",
        "needs --data-parallel-sharding full",
        "--data-parallel-sharding full",
        2,
    ),
    Mistake(
        "--secondary-shard-size 1 --data-parallel-sharding full",
        "--secondary-shard-size 1",
        "use --data-parallel-sharding optimizer_gradients",
        "--data-parallel-sharding optimizer_gradients --secondary-shard-size none",
        2,
    ),
    Mistake(
        "--secondary-shard-size 3 --data-parallel-sharding full",
        "--secondary-shard-size 3",
        "a divisor of 4",
        "--secondary-shard-size 2",
        4,
    ),
    Mistake(
        "--tp 2 --pp 2",
        "--tensor-model-parallel-size 2 × --pipeline-model-parallel-size 2",
        "--nproc-per-node 4",
        "--pp 1",
        2,
    ),
    Mistake("--cp 2 --pp 2", "--context-parallel-size 2 × --pipeline", "--nproc-per-node 4", "--pp 1", 2),
    Mistake("--gbs 10 --mbs 2", "--global-batch-size 10", "use 8 or 12", "--gbs 12", 2),
    Mistake("--gbs 2", "--global-batch-size 2", "use 4", "--gbs 4", 4),
    Mistake("--pp 2 --vpp 2 --gbs 6 --mbs 2", "--virtual-pipeline-model-parallel-size", "use 4 or 8", "--gbs 8", 2),
    Mistake("--profile --profile-ranks 0 2", "--profile-ranks 2", "use 0 to 1", "--profile-ranks 0 1", 2),
)

MIXTURE = "--num-experts 4"

EXPERTS = (
    Mistake(
        f"{MIXTURE} --set model.experts.router_topk=5",
        "model.experts.router_topk 5",
        "at most 4",
        "--set model.experts.router_topk=4",
    ),
    Mistake(
        f"{MIXTURE} --set model.experts.router_topk=1",
        "model.experts.router_topk 1",
        "add --set model.experts.router_pre_softmax=true",
        "--set model.experts.router_pre_softmax=true",
    ),
    Mistake(
        f"{MIXTURE} --set model.experts.dense_layers=[4]",
        "model.experts.dense_layers 4",
        "0 to 3",
        "--set model.experts.dense_layers=[3]",
    ),
    Mistake(
        f"{MIXTURE} --set model.experts.dense_layers=[0,1,2,3]",
        "model.experts.dense_layers 0",
        "name fewer",
        "--set model.experts.dense_layers=[3]",
    ),
    Mistake(
        f"{MIXTURE} --set model.experts.router_num_groups=2",
        "model.experts.router_num_groups",
        "add it, or leave both out",
        "--set model.experts.router_group_topk=1",
    ),
    Mistake(
        f"{MIXTURE} --set model.experts.router_num_groups=3 model.experts.router_group_topk=1",
        "model.experts.router_num_groups 3",
        "set it to 4, 2 or 1",
        "--set model.experts.router_num_groups=2",
    ),
    Mistake(
        f"{MIXTURE} --set model.experts.router_num_groups=4 model.experts.router_group_topk=1",
        "model.experts.router_group_topk 1",
        "raise it",
        "--set model.experts.router_group_topk=2",
    ),
    Mistake(
        f"{MIXTURE} --set model.experts.router_enable_expert_bias=true",
        "model.experts.router_enable_expert_bias",
        "add --set model.experts.router_score_function=sigmoid",
        "--set model.experts.router_score_function=sigmoid",
    ),
    Mistake(
        f"{MIXTURE} --set model.experts.router_score_function=sigmoid model.experts.router_enable_expert_bias=true "
        "--freeze language",
        "changes the router's frozen bias",
        "add --moe-router-bias-update-rate 0",
        "--moe-router-bias-update-rate 0",
    ),
    Mistake(f"{MIXTURE} --ep 3 --gbs 6", "--expert-model-parallel-size 3", "4, 2 or 1", "--ep 1", 3),
    Mistake(
        f"{MIXTURE} --etp 3 --gbs 6 --set model.experts.ffn_hidden_size=64",
        "model.experts.ffn_hidden_size 64",
        "63 or 66",
        "--etp 1",
        3,
    ),
    Mistake(
        f"{MIXTURE} --etp 2 --set model.experts.ffn_hidden_size=36",
        "36 is not a multiple of 8",
        "use 32 or 40",
        "--etp 1",
        2,
    ),
    Mistake(
        f"{MIXTURE} --precision bf16 --set model.language.num_attention_heads=2 model.language.hidden_size=132",
        "model.language.hidden_size 132 is not a multiple of 8",
        "use 128 or 136",
        "--set model.language.hidden_size=128",
    ),
    Mistake(
        f"{MIXTURE} --tp 2 --set model.experts.shared_ffn_hidden_size=33",
        "model.experts.shared_ffn_hidden_size 33",
        "32 or 34",
        "--set model.experts.shared_ffn_hidden_size=34",
        2,
    ),
    Mistake(f"{MIXTURE} --tp 2 --no-sp", "--num-experts", "leave --no-sequence-parallel out", "--sp", 2),
    Mistake(f"{MIXTURE} --ep 4", "--expert-model-parallel-size 4", "use --ep 2 and --etp 1", "--ep 2", 2),
    Mistake(
        f"{MIXTURE} --data-parallel-sharding full",
        "--data-parallel-sharding full",
        "use --data-parallel-sharding optimizer",
        "--data-parallel-sharding optimizer",
    ),
    Mistake(f"{MIXTURE} --hybrid-shard-size 2", "--hybrid-shard-size", "leave it out", "--hybrid-shard-size none", 2),
    Mistake(
        f"{MIXTURE} --data-parallel-sharding optimizer_gradients",
        "--data-parallel-sharding optimizer_gradients",
        "use --data-parallel-sharding optimizer",
        "--data-parallel-sharding optimizer",
    ),
    Mistake(
        f"{MIXTURE} --precision bf16 --fp8 hybrid --fp8-recipe delayed",
        "does not support --fp8-recipe delayed",
        "use --fp8-recipe tensorwise",
        "--fp8-recipe tensorwise",
    ),
    Mistake(
        f"{MIXTURE} --precision bf16 --fp8 hybrid --fp8-param-gather",
        "does not support --fp8-param-gather",
        "leave it out",
        "--no-fp8-param-gather",
    ),
    Mistake(
        f"{MIXTURE} --precision bf16 --fp8 hybrid --set model.experts.ffn_hidden_size=24",
        "model.experts.ffn_hidden_size 24 is not a multiple of 16",
        "use 16 or 32",
        "--set model.experts.ffn_hidden_size=32",
    ),
    Mistake(
        f"{MIXTURE} --precision bf16 --fp8 hybrid --set model.experts.shared_ffn_hidden_size=24",
        "model.experts.shared_ffn_hidden_size 24 is not",
        "use 16 or 32",
        "--set model.experts.shared_ffn_hidden_size=32",
    ),
    Mistake(
        f"{MIXTURE} --lora-rank 4 --lora-targets experts --lora-dropout 0.1",
        "--lora-dropout 0.1",
        "set it to 0",
        "--lora-dropout 0",
    ),
    Mistake(
        f"{MIXTURE} --lora-rank 4 --lora-targets vision --set lora.train_router=true",
        "lora.train_router has no effect",
        "name some of its layers in --lora-targets",
        "--lora-targets language",
    ),
    Mistake(
        f"{MIXTURE} --lora-rank 4 --moe-aux-loss-coeff 0.01",
        "--moe-aux-loss-coeff has no effect",
        "add --set lora.train_router=true",
        "--set lora.train_router=true",
    ),
    Mistake("--ep 2", "--expert-model-parallel-size has no effect without experts", "--num-experts 8", "--ep 1", 2),
    Mistake(
        "--set model.experts.router_topk=3",
        "model.experts.router_topk has no effect",
        "--num-experts 8",
        "--num-experts 8",
    ),
    Mistake(
        f"{MIXTURE} --set model.experts.shared_gate=true",
        "model.experts.shared_gate has no effect",
        "add --set model.experts.shared_ffn_hidden_size",
        "--set model.experts.shared_ffn_hidden_size=16",
    ),
    Mistake(
        f"{MIXTURE} --set model.experts.router_score_function=sigmoid model.experts.router_pre_softmax=true",
        "model.experts.router_pre_softmax has no effect",
        "use --set model.experts.router_score_function=softmax",
        "--set model.experts.router_score_function=softmax",
    ),
    Mistake(
        f"{MIXTURE} --moe-aux-loss-coeff 0.01 --freeze language",
        "--moe-aux-loss-coeff has no effect with a frozen language model",
        "do not freeze language",
        "--freeze vision",
    ),
    Mistake(
        f"{MIXTURE} --moe-router-bias-update-rate 0.1",
        "--moe-router-bias-update-rate has no effect",
        "add --set model.experts.router_enable_expert_bias=true",
        "--set model.experts.router_score_function=sigmoid model.experts.router_enable_expert_bias=true",
    ),
)

RUN = (
    Mistake("--profile --profile-step-start 12", "--profile-step-start 12", "at most 11", "--profile-step-start 11"),
    Mistake("--profile --train-iters 5", "--profile-step-start 10", "use at most 4", "--profile-step-start 4"),
    Mistake("--profile --profile-ranks", "--profile-ranks", "name ranks", "--profile-ranks 0"),
    Mistake("--callback my_module.Mine", "--callback 'my_module.Mine'", "write it as in", "--callback my_module:Mine"),
    Mistake("--callback ./mine.py:Mine", "--callback './mine.py:Mine'", "write it as in", "--callback mine:Mine"),
    Mistake("--callback a:B a:B", "--callback names 'a:B' twice", "leave one of them out", "--callback a:B"),
    Mistake("--tracker wandb wandb", "--tracker names 'wandb' twice", "leave one of them out", "--tracker wandb"),
    Mistake("--tracker wandb --tracker-project=", "--tracker-project", "name the project", "--tracker-project mine"),
    Mistake(
        "--optimizer muon --lora-rank 4 --freeze vision projector",
        "--optimizer muon",
        "use --optimizer adamw",
        "--optimizer adamw",
    ),
    Mistake(f"{MUON} --offload optimizer=nvme:/d", "--optimizer muon updates whole", "adamw, or lion", "--offload"),
    Mistake(
        "--set evaluation.eval_ema=true --data digits",
        "evaluation.eval_ema has no effect without averaged",
        "add --ema-decay",
        "--set evaluation.eval_ema=false",
    ),
    Mistake("--qk-clip --lora-rank 4 --freeze vision", "--qk-clip has nothing", "leave it out", "--no-qk-clip"),
    Mistake(
        "--qk-clip --set model.language.qk_norm=true --freeze vision",
        "--qk-clip has nothing",
        "leave it out",
        "--no-qk-clip",
    ),
    Mistake(
        "--set optimizer.qk_clip_alpha=0.3",
        "optimizer.qk_clip_alpha has no effect without --qk-clip",
        "add it",
        "--qk-clip",
    ),
    Mistake(
        "--set optimizer.muon_momentum=0.9",
        "optimizer.muon_momentum has no effect without --optimizer muon",
        "add it",
        MUON,
    ),
    Mistake(
        "--set optimizer.lion_beta2=0.98", "optimizer.lion_beta2 has no effect without", "add it", "--optimizer lion"
    ),
    Mistake(f"{LION} --adam-beta2 0.9", "--adam-beta2 has no effect with --optimizer lion", "adamw, or muon", MUON),
    Mistake("--tracker-run-name x", "--tracker-run-name has no effect", "add --tracker", "--tracker mlflow"),
    Mistake("--data files", "--data files", "name your data sets", "--data synthetic"),
    Mistake("--datasets a.json --data digits", "--datasets", "leave one of them out", "--data files"),
    Mistake("--datasets ,weight=2", "--datasets", "write path", "--datasets a.json"),
    Mistake("--datasets a.json,weight=0", "weight 0.0", "greater than 0", "--datasets a.json,weight=1"),
    Mistake("--datasets a/t.json b/t.json", "--datasets", "name=", "--datasets a/t.json b/t.json,name=b"),
    Mistake(
        "--iterations-to-skip 12 5-3", "--iterations-to-skip '5-3'", "numbers from 1", "--iterations-to-skip 12 3-5"
    ),
    Mistake("--on-spike rewind", "--on-spike rewind", "add --save-interval", "--save-interval 10"),
    Mistake(
        "--data digits --keep-best validation/loss --save-interval 10 --eval-interval 4",
        "--keep-best 'validation/loss'",
        "multiple of --eval-interval 4",
        "--save-interval 8",
    ),
    Mistake(
        "--keep-best validation/loss --save-interval 10",
        "--keep-best 'validation/loss' needs validation data",
        "--validation-split 0.01",
        "--datasets a.json --validation-split 0.01",
    ),
    Mistake(
        "--datasets a.json --validation b.json --validation-split 0.1",
        "--validation and --validation-split",
        "leave one of them out",
        "--validation-split 0",
    ),
    Mistake(
        "--datasets a.json --validation b.json,weight=2",
        "--validation 'b.json' has a weight",
        "leave it out",
        "--validation b.json",
    ),
    Mistake(
        "--datasets a.json --validation a/t.json b/t.json",
        "--validation has two",
        "name=",
        "--validation a/t.json b/t.json,name=b",
    ),
    Mistake("--min-lr 1", "--min-lr 1.0", "lower --min-lr or raise --lr", "--lr 1"),
    Mistake(
        "--precision fp16 --set optimizer.min_loss_scale=8192",
        "optimizer.min_loss_scale 8192.0",
        "raise the latter",
        "--set optimizer.initial_loss_scale=8192",
    ),
    Mistake("--precision fp16 --placement colocated", "--precision fp16", "--placement stages", "--precision bf16"),
    Mistake(
        "--epochs 2 --train-iters 5 --datasets a.json",
        "--epochs 2 and --train-iters 5",
        "leave one of them out",
        "--epochs none",
    ),
    Mistake(
        "--lr-warmup-fraction 0.1 --lr-warmup-iters 5",
        "--lr-warmup-fraction 0.1 and --lr-warmup-iters 5",
        "leave one of them out",
        "--lr-warmup-fraction none",
    ),
    Mistake("--lr-warmup-iters 101", "--lr-warmup-iters 101", "or train longer", "--train-iters 102"),
    Mistake("--lr-warmup-iters 100", "--lr-warmup-iters 100", "at most 99", "--lr-warmup-iters 99"),
    Mistake("--train-iters 1 --lr-warmup-iters 1", "--lr-warmup-iters 1", "at most 0", "--lr-warmup-iters 0"),
    Mistake("--lr-warmup-iters 50 --lr-decay-iters 40", "--lr-decay-iters 40", "at most 39", "--lr-warmup-iters 39"),
    Mistake("--lr-wsd-decay-iters 5", "--lr-wsd-decay-iters", "--lr-decay-style WSD", "--lr-decay-style WSD"),
    Mistake(
        "--lr-decay-style WSD --lr-wsd-decay-iters 95 --lr-warmup-iters 10",
        "--lr-wsd-decay-iters 95",
        "at most 90",
        "--lr-wsd-decay-iters 90",
    ),
    Mistake(
        "--lr-decay-style WSD --lr-warmup-iters 95", "--lr-wsd-decay-iters 10", "at most 5", "--lr-wsd-decay-iters 5"
    ),
    Mistake(
        "--set data.imageless_samples=[0,8]",
        "data.imageless_samples 8",
        "use 0 to 7",
        "--set data.imageless_samples=[0,7]",
    ),
    Mistake("--run-dir=", "--run-dir", "name the folder", "--run-dir a"),
    Mistake(f"--run-dir {__file__}", "--run-dir", "is a file: choose another", "--run-dir a"),
    Mistake(f"--run-dir {__file__}/below", "--run-dir", "is a file: choose another", "--run-dir a"),
    Mistake(f"--run-dir {'x' * 300}", "--run-dir", "cannot be used", "--run-dir a"),
    Mistake("--run-dir a\udcff", "--run-dir", "is no UTF-8 text: choose another name", "--run-dir a"),
    Mistake("--run-dir a\0b", "--run-dir", "has a NUL: choose another name", "--run-dir a"),
]
SPELLING, TYPES = TABLE["spelling"], TABLE["types"]
RULE_MISTAKES = [mistake for section in list(TABLE)[2:] for mistake in TABLE[section]]
KNOWN = {
    *RUN_FLAGS,
    "--flag",
    "--nproc-per-node",
    *(flag for option in options() for flag in (*option.flags, *option.negations)),
}


def complaint(argv: list[str], *, world: int) -> str:
    with pytest.raises(UserError) as caught:
        check(parse(argv), world=world)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message.splitlines()) == 1
    return message


@pytest.fixture(autouse=True, scope="module")
def one_parser() -> Iterator[None]:
    """Build the parser of all options once: the tests here ask it a thousand times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsing, "_parser", functools.cache(parsing._parser))
        yield


def accept(argv: list[str], *, world: int) -> None:
    """Check a command line, which may begin torchrun's way: with as many processes as advice says."""
    words = list(argv)
    if "--nproc-per-node" in words:
        place = words.index("--nproc-per-node")
        world = int(words[place + 1])
        del words[place : place + 2]
    with suppress(SystemExit):  # --print-config
        check(parse(words), world=world)


def test_there_are_many() -> None:
    argvs = [mistake.argv for mistake in (*SPELLING, *TYPES, *RULE_MISTAKES)]
    assert len(set(argvs)) == len(argvs) >= 100


@pytest.mark.parametrize("mistake", [*SPELLING, *TYPES, *RULE_MISTAKES], ids=lambda mistake: mistake.argv[:60])
def test_a_mistake_is_named_with_its_remedy(mistake: Mistake) -> None:
    argv = shlex.split(mistake.argv)
    message = complaint(argv, world=mistake.world)
    assert mistake.names in message
    assert mistake.remedy in message
    unknown = {word.partition("=")[0] for word in argv} if mistake in SPELLING else set()
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", message)) <= KNOWN | unknown
    keys = {key for key in re.findall(KEY, message) if not key.endswith(".yaml")}
    assert mistake in SPELLING or keys <= {option.key for option in options()}


def test_what_is_proposed_leads_on() -> None:
    """Each remedy that a message of a mistake proposes is followed as it is written, however many it has."""
    ends, understood, mistakes = [], 0, (*SPELLING, *TYPES, *RULE_MISTAKES)
    for mistake in mistakes:
        argv, ask = shlex.split(mistake.argv), functools.partial(accept, world=mistake.world)
        understood += bool(followed(str(answer(argv, ask)), argv))
        if (end := dead_end(argv, ask, followed)) is not None:
            ends.append((mistake.argv, shlex.join(end), answer(end, ask)))
    assert ends == []
    assert understood >= 0.7 * len(mistakes)


@pytest.mark.parametrize("mistake", RULE_MISTAKES, ids=lambda mistake: mistake.argv[:60])
def test_the_remedy_works(mistake: Mistake) -> None:
    assert mistake.fix is not None
    mistaken = parse(shlex.split(mistake.argv))
    if "--datasets" in mistake.fix:  # data sets add up: the remedy is in their place
        mistaken = replace(mistaken, data=replace(mistaken.data, datasets=()))
    values = {option.path: value_at(parse(shlex.split(mistake.fix)), option.path) for option in given(mistake.fix)}
    check(with_values(mistaken, values), world=mistake.world)


def given(flags: str) -> list[Option]:
    words = {word.partition("=")[0] for word in shlex.split(flags)}
    return [option for option in options() if words & {option.key, *option.flags, *option.negations}]


def test_every_message_has_a_mistake() -> None:
    """A message that nothing here trips is one that nobody has seen work: each `yield` of a rule is reached."""
    reached = set()
    for mistake in RULE_MISTAKES[len(TABLE["ranges"]) :]:
        config = with_start_defaults(parse(shlex.split(mistake.argv)))
        ran = [*(rule(config) for rule in RULES), *(rule(config, mistake.world) for rule in WORLD_RULES)]
        line = next(line for line in map(place_of_message, ran) if line)  # lazily: a rule relies on those before it
        reached.add(line)
    unseen = [place[0] for place in messages() if not any(one in reached for one in place)]
    assert all(file == "run_rules.py" for file, _ in unseen), unseen
    assert len(unseen) == 2, "of folders with a model and with checkpoints, which tests below make"


def place_of_message(rule: Any) -> tuple[str, int] | None:
    """The file and line of the `yield` at which a rule has stopped, through those that it yields from."""
    if next(rule, None) is None:
        return None
    while rule.gi_yieldfrom is not None:
        rule = rule.gi_yieldfrom
    return Path(rule.gi_code.co_filename).name, rule.gi_frame.f_lineno


def messages() -> Iterator[list[tuple[str, int]]]:
    """Yield the file and the lines of each message in the modules of rules."""
    for file in sorted(Path(rules.__file__).parent.glob("*_rules.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Yield):
                yield [(file.name, line) for line in range(node.lineno, (node.end_lineno or 0) + 1)]


YAML_MISTAKES = (
    ("trian: {train_iters: 5}", "unknown key trian", "did you mean train?"),
    ("train: {train_itres: 5}", "unknown key train.train_itres", "did you mean train.train_iters?"),
    ("train: {train-iters: 5}", "unknown key train.train-iters", "did you mean train.train_iters?"),
    ("parallel: {tp: 2}", "unknown key parallel.tp", "did you mean parallel.tensor_model_parallel_size?"),
    ("lr: 0.1", "unknown key lr", "did you mean optimizer.lr?"),
    ("model: {num_layers: 3}", "unknown key model.num_layers", "model.vision.num_layers or model.language.num_layers?"),
    ("model: {vision: {xyzzy: 3}}", "unknown key model.vision.xyzzy", "model.vision has num_layers, hidden_size"),
    ("train_itres: 5", "unknown key train_itres", "did you mean train.train_iters?"),
    ("train: {lr: 0.1}", "unknown key train.lr", "did you mean optimizer.lr?"),
    ("xyzzy: 1", "unknown key xyzzy", "the top level has"),
    ("1: 2", "unknown key 1", "the top level has"),
    ("train: {micro_batch_size: '5'}", "train.micro_batch_size", "expects an integer, got '5'"),
    ("train: {micro_batch_size: 5.0}", "train.micro_batch_size", "expects an integer, got 5.0"),
    ("train: {micro_batch_size: true}", "train.micro_batch_size", "expects an integer, got True"),
    ("train: {micro_batch_size: null}", "train.micro_batch_size", "expects an integer, got null"),
    ("run: {run_dir: 2024-01-01}", "run.run_dir", "expects a text"),
    ("run: {run_dir: 5}", "run.run_dir", "expects a text, got 5"),
    ("run: {dry_run: 1}", "run.dry_run", "expects true or false, got 1"),
    ("precision: {dtype: fp15}", "precision.dtype", "bf16, fp16 or null, got 'fp15': did you mean"),
    ("optimizer: {lr: fast}", "optimizer.lr", "expects a number or null, got 'fast'"),
    ("optimizer: {lr: .nan}", "optimizer.lr", "expects a number or null, got nan"),
    ("optimizer: {lr: true}", "optimizer.lr", "expects a number or null, got True"),
    ("optimizer: {vision_lr: none}", "optimizer.vision_lr", "expects a number or null, got 'none'"),
    ("model: {freeze: vision}", "model.freeze", "write it in [brackets]"),
    ("model: {freeze: [visoin]}", "model.freeze", "did you mean vision?"),
    ("data: {image_sizes: [8, x]}", "data.image_sizes", "expects a list of integers, got 'x'"),
    ("data: {datasets: a.json}", "data.datasets", "got 'a.json': write [{path: 'a.json'}]"),
    ("data: {datasets: [a.json]}", "data.datasets", "got 'a.json': write {path: 'a.json'}"),
    ("data: {datasets: {path: '${HOME}/a'}}", "data.datasets", "write it in [brackets]"),
    ("run: {run_dir: '${HOME}/a'}", "starts with ${HOME}", "write the full path"),
    ("data: {image_sizes: null}", "data.image_sizes", "expects a list of integers, got null"),
    ("train: 5", "train expects a mapping", "got 5"),
    ("train:", "train expects a mapping", "leave it out"),
    ("train: {seed: 1}\ntrain: {seed: 2}", "train twice", "merge them"),
    ("train: {seed: 1, seed: 2}", "seed twice", "remove one"),
    ("- train", "expects a mapping", "got ['train']"),
    ("hello", "expects a mapping", "got 'hello'"),
    ("", "is empty", "leave out --config"),
    ("train: {seed: 1", "not valid YAML", "line 1"),
    ("train:\n\tseed: 1", "not valid YAML", "line 2"),
    ("train: !!python/object/apply:os.getcwd []", "not valid YAML", "line 1"),
    ("train: {seed: \x00}", "not valid YAML", "--config"),
)


@pytest.mark.parametrize(("text", "names", "remedy"), YAML_MISTAKES)
def test_a_mistake_in_a_file_is_named_with_its_remedy(tmp_path: Path, text: str, names: str, remedy: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    message = complaint(["--config", str(path)], world=1)
    assert f"--config {path}" in message or path.name in message
    assert names in message
    assert remedy in message


def test_what_is_proposed_for_a_file_leads_on() -> None:
    files = [yaml.safe_load(text) for text, names, _ in YAML_MISTAKES if "not valid" not in names]
    files = [data for data in files if isinstance(data, dict)]
    tried = [data for data in files if (message := answer(data, from_dict)) and followed_in_file(message, data)]
    assert len(tried) >= 25
    assert [(data, end) for data in tried if (end := dead_end(data, from_dict, followed_in_file)) is not None] == []


GRIDS = (
    "product: {learning_rte: [1e-4]}",
    "product: {learning_rate: [1e-4]}",
    "product: {train_itres: [5]}",
    "product: {tp: [two]}",
    "product: {precision: [bf61]}",
    "product: {num_train_epochs: [3]}\nflags: --datasets d",
    "list: [{freeze: [vison]}]",
    "list: [{packing: 'off'}]\nflags: --datasets d",
    "seeds: [1, 2]\nflags: --warmup-ratio 0.1",
    "product: {lora_alpha: [8]}",
    "product: {use_distributed_optimizer: [true]}",
)


@pytest.mark.parametrize("text", GRIDS)
def test_what_is_proposed_for_a_sweep_leads_on(tmp_path: Path, text: str) -> None:
    (tmp_path / "grid.yaml").write_text(f"run_dir: sweeps/a\n{text}\n")
    grid = read_grid(tmp_path / "grid.yaml")
    first = variants_of(grid)[0]
    with pytest.raises(UserError, match=re.escape(f"variant {first.name}: ")) as caught:
        check_variants(grid, [first], further=lambda config: None)
    ask = functools.partial(accept, world=1)
    assert answer(list(first.flags), ask) == str(caught.value).partition(": ")[2]
    assert followed(str(answer(list(first.flags), ask)), first.flags)
    assert dead_end(list(first.flags), ask, followed) is None


def test_a_run_writes_into_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert "has a config.json, as models do: name another folder" in complaint(["--run-dir", str(tmp_path)], world=1)


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/iter_0000005"])
def test_a_run_writes_into_no_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / "checkpoints/iter_0000005").mkdir(parents=True)
    (tmp_path / "checkpoints/iter_0000005/megavlm.json").touch()
    message = complaint(["--run-dir", str(tmp_path / name)], world=1)
    assert "is not a run, but its checkpoints: give it to --load" in message
    accept(["--load", str(tmp_path / name), "--run-dir", str(tmp_path / "other")], world=1)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\xff\xfe\x00\x80")
    assert "not UTF-8" in complaint(["--config", str(path)], world=1)
