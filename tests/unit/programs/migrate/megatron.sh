#!/bin/bash
# Options and shape of Megatron-LM's examples/multimodal/sft_mistral_clip.sh
export CUDA_DEVICE_MAX_CONNECTIONS=1
OUTPUT="${WORKSPACE}/output"
if [[ $DEBUG -eq 1 ]]; then
    LI=1
    EXTRA_ARGS="--freeze-LM"
else
    LI=10; EXTRA_ARGS=""
fi
NW=2
GPUS_PER_NODE=8
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes 2
)
OPTIONS=" \
    --apply-layernorm-1p \
    --attention-softmax-in-fp32 \
    --use-distributed-optimizer \
    --transformer-impl transformer_engine \
    --normalization RMSNorm \
    --group-query-attention \
    --num-query-groups 2 \
    --num-workers ${NW} \
    --untie-embeddings-and-output-weights \
    --disable-bias-linear \
    --position-embedding-type rope \
    --rotary-base 1000000 \
    --swiglu \
    --attention-dropout 0.0 \
    --hidden-dropout 0.0 \
    --tensor-model-parallel-size 2 \
    --pipeline-model-parallel-size 2 \
    --num-layers 4 \
    --hidden-size 256 \
    --num-attention-heads 8 \
    --seq-length 576 \
    --decoder-seq-length 2048 \
    --train-samples 1280000 \
    --lr-warmup-samples 12800 \
    --lr-decay-samples 1280000 \
    --micro-batch-size 1 \
    --global-batch-size 128 \
    --rampup-batch-size 16 16 5859375 \
    --lr 1e-6 \
    --min-lr 1e-7 \
    --lr-decay-style cosine \
    --log-interval ${LI} \
    --eval-iters 10 \
    --eval-interval 500 \
    --tokenizer-type HuggingFaceTokenizer \
    --tokenizer-model tokenizers/mistral \
    --data-path $DATA_TRAIN \
    --save-interval 500 \
    --save ${OUTPUT}/checkpoints \
    --load ${OUTPUT}/checkpoints \
    --split 95,5,0 \
    --clip-grad 0.5 \
    --weight-decay 0.1 \
    --adam-beta1 0.9 \
    --bf16 \
    --freeze-ViT \
    --patch-dim 14 \
    --img-h 336 \
    --img-w 336 \
    --disable-vision-class-token \
    ${EXTRA_ARGS} \
    --language-model-type=mistral_7b \
    --distributed-timeout-minutes 60 \
"
torchrun "${DISTRIBUTED_ARGS[@]}" examples/multimodal/train.py ${OPTIONS} # no value of --nnodes
