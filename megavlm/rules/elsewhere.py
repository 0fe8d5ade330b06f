"""Options of Transformers, TRL, LLaMA-Factory, ms-swift, DeepSpeed, Megatron-LM and LLaVA, and what they are here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection

from megavlm.config.optimizer_schema import RULES
from megavlm.program import program

_SHARDING = (
    "--data-parallel-sharding, where optimizer is ZeRO-1, optimizer_gradients is ZeRO-2 and full is ZeRO-3 or FSDP"
)
_STEP = "--global-batch-size, the sequences of a whole step"
_MADE = "samples are made while training: there is no tokenized or cached copy to set"
_TORCHRUN = "torchrun takes it: torchrun --nproc-per-node N --nnodes M …"
_LORA = "adapters are plain LoRA: --lora-rank, --lora-alpha, --lora-dropout and --lora-targets"
_HUB = "nothing is uploaded: write the weights with `megavlm convert export` and upload that folder"
_CACHE = "Hugging Face's variables say it (HF_TOKEN, HF_HOME), and NAME@REVISION names a revision of a model"
_KERNELS = "kernels follow from the device and --transformer-impl"
_TRACKER = "it has an environment variable of its tracker (--tracker), such as WANDB_ENTITY"

# What does the same here, with a note after a comma where the meaning differs, or why nothing has to: names elsewhere.
_MEANINGS = {
    # the model
    "--init-from": "model model-name-or-path pretrained-model-name-or-path model-name model-id model-id-or-path "
    "model-path model-dir base-model hf-model pretrained-checkpoint pretrained weights",
    "--init-from, which reads the weights alone": "finetune no-load-optim no-load-rng",
    "--vision-from": "vision-tower vision-model vision-model-type vision-encoder",
    "--language-from": "language-model language-model-type",
    "--projector-from": "pretrain-mm-mlp-adapter",
    "--projector-kind": "mm-projector-type vision-projection-type",
    "--set model.vision.feature_layer": "mm-vision-select-layer",
    "--set model.vision.image_size": "img-h img-w",
    "--set model.vision.patch_size": "patch-dim patch-size",
    "--set model.vision.class_token=false": "disable-vision-class-token",
    "--set model.language.max_positions": "max-position-embeddings",
    "--set model.language.activation=swiglu": "swiglu",
    "--set model.language.qk_norm=true": "qk-layernorm",
    "--set model.language.num_query_groups": "group-query-attention",
    "--set model.language.num_layers": "encoder-num-layers",
    "--set model.projector.anyres_max_tiles": "max-num-tiles use-tiling",
    "--set model.language.tie_embeddings=false": "untie-embeddings-and-output-weights",
    "--set model.language.rotary_base": "rope-theta use-rotary-position-embeddings position-embedding-type",
    "--set model.language.rope_scaling": "rope-scaling-type use-rope-scaling",
    "vocabularies are padded to the layout by themselves": "make-vocab-size-divisible-by resize-vocab",
    "models are those of megatron-core": "use-mcore-models use-legacy-models use-checkpoint-args model-type",
    "code out of model repositories is never run": "trust-remote-code",
    "--tokenizer": "tokenizer-name tokenizer-name-or-path tokenizer-path tokenizer-model tokenizer-type vocab-file "
    "merge-file",
    "--chat-template, where the folder's own is not meant": "template use-chat-template tokenizer-prompt-format "
    "version",
    _CACHE: "token hf-token use-auth-token cache-dir model-revision revision",
    # what is trained
    "--freeze, the parts that are not trained": "trainable-parameters tune-mm-llm tune-mm-mlp tune-mm-vision "
    "freeze-parameters",
    "--freeze vision": "freeze-vit freeze-vision-tower freeze-vision-model freeze-vision",
    "--freeze projector": "freeze-aligner freeze-multi-modal-projector freeze-mm-mlp-adapter freeze-merger",
    "--freeze language": "freeze-llm freeze-lm freeze-language-model freeze-backbone",
    "--freeze vision language": "train-mm-proj-only tune-mm-mlp-adapter",
    "--lora-rank, above 0 for LoRA, without which all is trained": "finetuning-type train-type tuner-type sft-type "
    "use-lora use-peft lora-enable lora-r lora-dim tuner-backend peft-type",
    "--lora-targets": "lora-target lora-target-modules target-modules target-regex",
    _LORA: "lora-bias lora-bias-trainable lora-dtype use-rslora use-dora init-lora-weights modules-to-save "
    "additional-target loraplus-lr-ratio lora-lr-ratio",
    "weights are trained as they are: LoRA (--lora-rank) takes the least memory": "quantization-bit quant-method "
    "quant-bits quantization-method load-in-4bit load-in-8bit bnb-4bit-compute-dtype bnb-4bit-quant-type bits "
    "double-quantization",
    "a model is trained on answers or on vectors (--objective): there is no training by preferences": "stage rlhf-type "
    "pref-beta pref-loss beta ref-model reward-model",
    "a run trains, and validates where it has validation data": "do-train do-eval prediction-loss-only",
    "`megavlm evaluate` asks a model and scores its answers": "do-predict predict-with-generate "
    "include-for-metrics eval-accumulation-steps batch-eval-metrics eval-num-beams infer-backend",
    # data
    "--datasets": "dataset dataset-name dataset-path train-dataset train-file train-data data-path train-data-path "
    "data-files dataset-config data-dir train-dir",
    "--data synthetic": "mock-data",
    "--datasets, as PATH,image_root=DIR": "image-folder image-dir image-root images-dir media-dir dataset-dir "
    "video-folder",
    "--datasets, as PATH,weight=2": "interleave-probs dataset-weights mix-strategy",
    "--validation": "eval-dataset val-dataset validation-dataset validation-file valid-data-path eval-file",
    "--validation-split, a share": "val-size split-dataset-ratio eval-split-ratio split validation-split-percentage",
    "--seq-length": "max-length max-seq-length max-seq-len model-max-length sequence-len cutoff-len sequence-length "
    "block-size decoder-seq-length max-model-len",
    "--packing, which is on and fills sequences": "neat-packing sequence-packing padding-free group-by-length "
    "length-column-name train-sampling-strategy group-by-modality-length",
    "--train-on all": "train-on-prompt train-on-inputs",
    "--train-on last": "mask-history",
    "--train-on assistant": "assistant-only-loss completion-only-loss train-on-responses-only",
    "--train-on, which tokens count, or optimizer.initial_loss_scale, that of --precision fp16": "loss-scale",
    "--max-pixels": "image-max-pixels",
    "--min-pixels": "image-min-pixels",
    "--video-fps": "fps",
    "--set data.video_max_frames": "video-maxlen nframes fps-max-frames num-frames",
    "--video-max-tokens, in tokens": "video-max-pixels video-min-pixels video-total-pixels",
    "--num-workers": "dataloader-num-workers num-data-workers workers",
    "data workers are set up by --num-workers alone": "dataloader-pin-memory dataloader-prefetch-factor "
    "dataloader-persistent-workers dataloader-drop-last dataloader-multiprocessing-context dataloader-in-order "
    "accelerator-config dataloader-type",
    _MADE: "overwrite-cache preprocessing-num-workers preprocessing-batch-size tokenized-path cached-dataset "
    "load-from-cache-file data-cache-path dataset-num-proc streaming buffer-size shuffle-buffer-size lazy-tokenize "
    "lazy-preprocess",
    "no option limits data sets: give a smaller file, or --train-iters": "max-samples max-train-samples",
    "records are read by their fields: docs/data.md": "remove-unused-columns label-names dataset-text-field columns "
    "prompt-path",
    "--shuffle": "dataset-shuffle train-dataloader-shuffle",
    # length and batch
    "--epochs": "num-train-epochs num-epochs max-epochs epoch train-epochs",
    "--train-iters": "max-steps num-train-steps max-train-steps total-steps total-num-steps train-steps num-steps "
    "max-iters iters steps exit-interval",
    "--train-iters, steps of --global-batch-size samples": "train-samples",
    "--micro-batch-size": "per-device-train-batch-size per-gpu-train-batch-size train-micro-batch-size-per-gpu "
    "batch-size-per-gpu train-batch-size-per-device",
    "--micro-batch-size, also of validation": "per-device-eval-batch-size per-gpu-eval-batch-size eval-batch-size",
    _STEP: "gradient-accumulation-steps grad-accum-steps accumulate-grad-batches train-batch-size rampup-batch-size "
    "auto-find-batch-size",
    "--seed, also that of the order of the data": "data-seed",
    # optimizer and schedule
    "--lr": "learning-rate base-lr peak-lr max-lr",
    "--min-lr": "min-learning-rate lr-min cosine-min-lr warmup-min-lr",
    "--vision-lr": "vit-lr vision-tower-lr mm-vision-tower-lr",
    "--projector-lr": "aligner-lr mm-projector-lr merger-lr",
    "--language-lr": "llm-lr",
    "--lr-decay-style": "lr-scheduler-type lr-scheduler scheduler lr-schedule",
    "--lr-decay-style, with --min-lr and --lr-wsd-decay-iters": "lr-scheduler-kwargs",
    "--lr-warmup-iters, or --lr-warmup-fraction for a share": "warmup-steps num-warmup-steps lr-warmup-steps "
    "warmup-num-steps warmup",
    "--lr-warmup-fraction": "warmup-ratio lr-warmup-ratio",
    "--lr-warmup-iters, in steps": "lr-warmup-samples",
    "--lr-decay-iters, in steps": "lr-decay-samples",
    "--lr-wsd-decay-iters, in steps": "lr-wsd-decay-samples",
    "--weight-decay": "wd start-weight-decay end-weight-decay weight-decay-incr-style",
    "--optimizer": "optim optimizer-name optimizer-type",
    "--optimizer, whose options are --weight-decay, --adam-beta1 and the like": "optim-args optim-target-modules "
    "galore-rank use-galore use-badam",
    "--adam-eps": "adam-epsilon",
    "--clip-grad": "max-grad-norm gradient-clipping gradient-clip-val grad-clip max-norm",
    "no option of training does it: labels are not smoothed, embeddings get no noise": "label-smoothing-factor "
    "neftune-noise-alpha neftune-alpha",
    # precision and memory
    "--precision": "torch-dtype dtype mixed-precision compute-dtype params-dtype amp",
    "--precision bf16": "bf16 pure-bf16 use-bf16",
    "--precision fp16": "fp16",
    "--precision fp32": "fp32",
    "--fp8": "fp8-format",
    "--set optimizer.hysteresis": "loss-scale-hysteresis",
    "--recompute-granularity full": "gradient-checkpointing activation-checkpointing vit-gradient-checkpointing "
    "use-gradient-checkpointing gradient-checkpointing-kwargs activation-checkpointing-kwargs recompute-method "
    "recompute-num-layers",
    "--recompute-granularity selective": "recompute-activations",
    "--recompute-granularity none": "disable-gradient-checkpointing",
    "--offload optimizer": "offload-optimizer optimizer-cpu-offload cpu-offload",
    "--offload optimizer parameters": "offload-param",
    "--compile-small-ops": "torch-compile torch-compile-backend torch-compile-mode",
    _KERNELS: "attn-implementation attn-impl flash-attn use-flash-attn attention-backend use-liger use-liger-kernel "
    "enable-liger-kernel liger-kernel-config use-unsloth tf32 attention-softmax-in-fp32 masked-softmax-fusion "
    "no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-rope-fusion cross-entropy-loss-fusion "
    "moe-grouped-gemm moe-permute-fusion",
    # processes and layout
    "--data-parallel-sharding optimizer": "use-distributed-optimizer",
    "--data-parallel-sharding none": "no-use-distributed-optimizer",
    _SHARDING: "deepspeed deepspeed-config zero-stage zero-optimization fsdp fsdp-config use-fsdp use-torch-fsdp2 "
    "use-megatron-fsdp data-parallel-sharding-strategy strategy",
    "--tensor-model-parallel-size": "tensor-parallel-size tp-size",
    "--pipeline-model-parallel-size": "pipeline-parallel-size pp-size",
    "--virtual-pipeline-model-parallel-size, the chunks of a stage": "num-layers-per-virtual-pipeline-stage "
    "num-virtual-stages-per-pipeline-rank",
    "--pipeline-cuts, without which the stages are balanced": "pipeline-model-parallel-layout "
    "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers account-for-embedding-in-pipeline-split "
    "account-for-loss-in-pipeline-split",
    "--vision-tensor-model-parallel-size": "encoder-tensor-model-parallel-size",
    "--context-parallel-size": "cp-size sequence-parallel-size ulysses-parallel-size ulysses-sequence-parallel-size",
    "--expert-model-parallel-size": "expert-parallel-size ep-size",
    "--moe-aux-loss-coeff, which is 0 without a balancing loss": "moe-router-load-balancing-type "
    "router-aux-loss-coef",
    "--set model.experts.dense_layers, the layers without experts": "moe-layer-freq",
    "--set model.experts.shared_gate=true": "moe-shared-expert-gate",
    "--set model.experts.shared_ffn_hidden_size": "moe-shared-expert-intermediate-size",
    "--distributed-timeout-minutes, in minutes": "ddp-timeout",
    "--set parallel.ddp_bucket_size, in parameters": "ddp-bucket-cap-mb reduce-bucket-size allgather-bucket-size",
    "--overlap-grad-reduce": "overlap-comm",
    "the backend follows from the device: NCCL on GPUs, gloo on CPUs": "ddp-backend distributed-backend use-cpu "
    "no-cuda cpu device device-map accelerator cuda",
    "it follows from the number of processes, divided by --tp, --pp and --cp": "dp dp-size data-parallel-size "
    "data-parallel-degree data-parallel-replicate-degree",
    _TORCHRUN: "nproc-per-node nnodes node-rank master-addr master-port local-rank num-processes num-machines "
    "machine-rank num-gpus num-nodes gpus rdzv-endpoint devices gpu-ids",
    # checkpoints and logging
    "--run-dir": "output-dir save-dir save exp-dir exp output",
    "--run-dir, which has a tensorboard folder": "logging-dir tensorboard-dir tensorboard-log-dir log-dir",
    "another --run-dir starts anew": "overwrite-output-dir",
    "--save-interval": "save-steps save-freq save-every checkpointing-steps",
    "--save-interval, in steps": "save-strategy",
    "--keep-checkpoints": "save-total-limit checkpoints-total-limit max-checkpoints",
    "--keep-best, the metric": "load-best-model-at-end metric-for-best-model",
    "--set checkpoint.keep_best_mode, which is min or max": "greater-is-better",
    "--load, or the same --run-dir": "resume-from-checkpoint resume load-dir resume-from checkpoint ckpt "
    "checkpoint-path ckpt-path resume-training restore-file",
    "checkpoints are whole: `megavlm convert export` writes the weights alone": "save-only-model no-save-optim "
    "no-save-rng save-safetensors save-on-each-node enable-jit-checkpoint export-dir",
    "checkpoints have one format, which every layout reads": "ckpt-format dist-ckpt-format use-dist-ckpt "
    "ckpt-convert-format ckpt-fully-parallel-save auto-detect-ckpt-format",
    "a signal always saves and ends the run": "exit-signal-handler exit-duration-in-mins",
    "a resumed run goes on with the next sample: no option skips that": "ignore-data-skip "
    "restore-callback-states-from-checkpoint",
    _HUB: "push-to-hub hub-token hub-model-id hub-strategy hub-private-repo hub-always-push hub-revision use-hf",
    "--log-interval, in steps": "logging-strategy logging-first-step",
    "--log-interval": "logging-steps log-every-n-steps steps-per-print print-freq",
    "metrics.jsonl always has it": "log-throughput include-num-input-tokens-seen log-params-norm "
    "wall-clock-breakdown plot-loss timing-log-level skip-memory-metrics",
    "--tracker, beside TensorBoard, which is on": "report-to with-tracking log-with",
    "--tracker wandb": "use-wandb",
    "--tracker-project": "project project-name",
    "--tracker-run-name": "run-name exp-name experiment-name wandb-name wandb-run-name",
    _TRACKER: "wandb-entity wandb-save-dir trackio-space-id trackio-bucket-id trackio-static-space-id",
    "--eval-interval, in steps": "eval-strategy evaluation-strategy",
    "--eval-interval": "eval-steps evaluation-steps val-check-interval eval-every",
    "validation runs every --eval-interval iterations": "eval-delay eval-on-start",
    "--eval-iters": "limit-val-batches eval-batches max-eval-samples",
    "--callback": "callbacks",
    "--extension": "external-plugins custom-register-path",
}  # fmt: skip
ELSEWHERE = {name: meaning for meaning, names in _MEANINGS.items() for name in names.split()}

# Values of options by the words that are used for them elsewhere.
_VALUES = {
    "fp32": "float32 float 32 f32 32-true",
    "bf16": "bfloat16 bf16-mixed bf16-true",
    "fp16": "float16 half 16 f16 16-mixed fp16-mixed",
    "hybrid": "fp8 e5m2",
    "optimizer": "zero-1 zero1 stage-1",
    "optimizer_gradients": "zero-2 zero2 stage-2 shard-grad-op optim-grads",
    "full": "zero-3 zero3 stage-3 fsdp full-shard optim-grads-params",
    **{rule.name: rule.elsewhere for rule in RULES.values()},
    "WSD": "warmup-stable-decay",
    "constant": "constant-with-warmup",
    "interleaved": "interleaved-1f1b",
    "zb-h1": "zerobubble zero-bubble",
    "vision": "vit vision-tower vision-model visual",
    "projector": "aligner merger mm-projector multi-modal-projector",
    "language": "llm lm language-model",
    "te": "transformer-engine transformer-engine-fp8",
    "torch": "local",
}

# A key that tells whose file of options it is in.
_SIGNS = {
    "Axolotl": ("base_model", "sequence_len"),
    "Accelerate": ("distributed_type", "num_machines"),
    "DeepSpeed": ("zero_optimization", "train_micro_batch_size_per_gpu", "steps_per_print"),
    "ms-swift": ("tuner_type", "train_type", "tuner_backend", "swift_version", "split_dataset_ratio"),
    "LLaMA-Factory": ("finetuning_type", "cutoff_len", "stage"),
    "Megatron-LM": ("tensor_model_parallel_size", "micro_batch_size", "decoder_seq_length"),
    "Transformers": ("per_device_train_batch_size", "num_train_epochs", "output_dir"),
}


def meaning_of(word: str) -> str:
    """Return what does here what an option of another trainer does there, or why nothing does; "" for other words.

    A text that starts with `--` is an option, with its value where it has to have that one and a note after a comma.
    """
    return ELSEWHERE.get(_bare(word), "")


def hint(word: str, *, written: Callable[[str], str]) -> str:
    """Return what a message says of an option of another trainer: `": here it is --lr"`, or why it is not needed.

    A misspelt one is named as well. `written` returns an option as it is written where the word stood. Empty for words
    that are like no such option.
    """
    bare = _bare(word)
    near = difflib.get_close_matches(bare, ELSEWHERE, n=1, cutoff=0.8)
    if not near:
        return ""
    meaning = re.sub("megavlm ([a-z]+)", lambda found: program(found[1]), ELSEWHERE[near[0]])
    said = f": here it is {written(meaning)}" if meaning.startswith("--") else f": {meaning}"
    return said if near[0] == bare else f": did you mean {near[0]}?{said[1:]}"


def exact_hint(word: str, *, written: Callable[[str], str]) -> str:
    """Return what `hint` says of a word that is spelt as another trainer spells it; an empty string for others."""
    return hint(word, written=written) if meaning_of(word) else ""


def value_hint(word: str, choices: Collection[str]) -> str:
    """Return `": did you mean X?"` for a value that another trainer has for one of the choices; "" for other words."""
    bare = _bare(word).removeprefix("torch.")
    if bare == "fp8" and "fp16" in choices:
        return ": FP8 is an option of its own, --fp8 hybrid, beside bf16"
    same = (choice for choice in choices if bare == choice.lower() or bare in _VALUES.get(choice, "").split())
    return f": did you mean {found}?" if (found := next(same, None)) else ""


def trainer_of(keys: Collection[str]) -> str:
    """Return the name of the trainer whose file has these keys, or "another trainer"."""
    return next((name for name, signs in _SIGNS.items() if not set(signs).isdisjoint(keys)), "another trainer")


def _bare(word: str) -> str:
    return word.lstrip("-").replace("_", "-").lower()
