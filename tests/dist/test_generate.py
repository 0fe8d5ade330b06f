"""Answers with a key/value cache at any layout are those of one process without a cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.answers import NEW_TOKENS, answers
from tests.support.covering import slow
from tests.support.flags import MODELS
from tests.support.pool import Pools
from tests.support.training import SMALL

CASES = [
    (1, "rich", ""),
    (2, "gemma3", "--tp 2"),
    (2, "qwen3.5", "--tp 2"),
    (2, "gemma4", "--pp 2"),
    (2, "shared-kv", "--data-parallel-sharding full"),
    (2, "latents", "--tp 2"),
    (2, "paligemma", "--pp 2"),
    (2, "sinks", "--cp 2"),
    slow(4, "qwen3-vl", "--tp 2 --pp 2 --vpp 2"),
    slow(1, "qwen2.5-vl", ""),
    slow(2, "llava-onevision", "--pp 2 --vpp 2"),
    slow(2, "audio", "--pp 2 --vpp 2"),
    slow(2, "audio", "--cp 2"),
    slow(4, "gemma3", "--cp 2 --tp 2"),
    slow(4, "qwen3-vl", "--cp 2 --pp 2 --placement colocated"),
    slow(4, "qwen3.5", "--tp 4"),
    slow(2, "qwen3.5", "--cp 2"),
    slow(4, "latents", "--pp 2 --vpp 2 --cp 2"),
    slow(4, "rich", "--cp 4 --cp-comm-type all_gather"),
]


def argv(model: str, *flags: str) -> list[str]:
    # Larger weights than training begins with: no two tokens are nearly as likely.
    return [*SMALL, "--no-save", "--init-method-std", "0.2", *MODELS[model].split(), *flags]


@pytest.mark.parametrize(("world", "model", "flags"), CASES)
def test_answers_are_those_of_a_model_without_a_cache(pools, tmp_path, world, model, flags):
    (expected,) = pools(1).run(_uncached, argv(model), str(tmp_path / "one"))
    found = pools(world).run(answers, argv(model, *flags.split()), str(tmp_path / "many"))
    assert len({tuple(answer) for answer in expected}) > 1, "the prompts make no difference"
    assert found == [expected] * world


def test_an_answer_ends_before_a_stop_token(pools: Pools, tmp_path: Path) -> None:
    (whole,) = pools(1).run(answers, argv("plain"), str(tmp_path / "whole"))
    stop = [whole[0][2], whole[1][0]]
    for world, flags in ((1, ()), (2, ("--pp", "2"))):
        found = pools(world).run(_stopped, argv("plain", *flags), str(tmp_path / "stopped"), stop)
        expected = [each[: next((i for i, token in enumerate(each) if token in stop), NEW_TOKENS)] for each in whole]
        assert found == [expected] * world


def test_replicas_whose_answers_end_sooner_go_on_with_the_others(pools: Pools, tmp_path: Path) -> None:
    """With ZeRO-3 layers gather weights from all replicas: one that stopped alone would leave the other waiting."""
    (whole,) = pools(1).run(answers, argv("plain"), str(tmp_path / "whole"))
    stop = [answer[0] for answer in whole[::2]]  # replica 0 takes every second prompt
    later = [answer for answer in whole[1::2] if not set(stop) & set(answer[:2])]
    assert later, "no answer of replica 1 has more tokens than those of replica 0"
    flags = argv("plain", "--data-parallel-sharding", "full")
    found = pools(2).run(_stopped, flags, str(tmp_path / "run"), stop)
    ends = [next((i for i, token in enumerate(answer) if token in stop), NEW_TOKENS) for answer in whole]
    assert found == [[answer[:end] for answer, end in zip(whole, ends, strict=True)]] * 2


def _uncached(flags: list[str], run_dir: str) -> list[list[int]]:
    return answers(flags, run_dir, with_cache=False)


def _stopped(flags: list[str], run_dir: str, stop: list[int]) -> list[list[int]]:
    return answers(flags, run_dir, stop=stop)
