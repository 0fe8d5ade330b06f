"""Answers of an untrained model: by the program's generation, and token by token with no cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tests.support.training import started

NEW_TOKENS = 7


def answers(argv: Sequence[str], run_dir: str, *, with_cache: bool = True, stop: Sequence[int] = ()) -> list[list[int]]:
    """Return the answers to five prompts of several lengths, with no image up to two."""

    from megavlm.data.collate import CollateSpec
    from megavlm.train.generate import generate

    with started(argv, run_dir) as run:
        source: Any = run.source  # of samples that are computed
        spec = CollateSpec.of(run.config, run.source)
        prompts = [_prompt(source.sample(index), spec.image_token, number) for number, index in enumerate(range(5))]
        with run.engine.evaluation():
            if with_cache:
                found = generate(run.engine, spec, prompts, micro_batch_size=2, max_new_tokens=NEW_TOKENS, stop=stop)
            else:
                found = [_without_cache(run, spec, prompt) for prompt in prompts]
    return found


def _prompt(sample: Any, image_token: int, number: int) -> Any:
    """Return the beginning of a sample up to some tokens after its last image."""
    images = np.flatnonzero(sample.tokens == image_token)
    length = (int(images[-1]) + 1 if len(images) else 3) + number
    return replace(sample, tokens=sample.tokens[:length], trained=sample.trained[:length])


def _without_cache(run: Any, spec: Any, prompt: Any) -> list[int]:
    from megavlm.data.collate import collate

    tokens = prompt.tokens
    for _ in range(NEW_TOKENS):
        answered = np.arange(len(tokens)) >= len(prompt.tokens)  # these are no part of a prefix that is seen both ways
        whole = replace(prompt, tokens=tokens, trained=answered)
        (scores,) = run.engine.schedule.logits([collate([[whole]], replace(spec, seq_length=len(tokens)))])
        last = scores[0, -1]
        last[list(spec.feature_tokens)] = -np.inf
        tokens = np.append(tokens, int(last.argmax()))
    return tokens[len(prompt.tokens) :].tolist()
