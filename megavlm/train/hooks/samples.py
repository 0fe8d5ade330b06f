"""Let the model answer the same held-out prompts while it trains, with the training pipeline and without a trace."""

from __future__ import annotations

import time
from collections.abc import Mapping

from megavlm.data.collate import CollateSpec
from megavlm.metrics import callback
from megavlm.metrics.callback import Value
from megavlm.resilience.phases import OTHER, VALIDATION
from megavlm.train.generate import GivenUp, generate
from megavlm.train.hooks.hook import RankHook, Step
from megavlm.train.hooks.stops import Stops
from megavlm.train.run import Run


class Samples(RankHook):
    """Asks a run's prompts before its first step, every `--sample-interval` steps and at its end; all ranks call it
    alike.
    """

    def __init__(self, run: Run, stops: Stops) -> None:
        self._run, self._stops = run, stops
        self._last = run.config.train.train_iters

    def begin(self) -> None:
        """Let the model of a new run answer."""
        if self._run.position.iteration == 0 and self._is_due(0):
            self.answer(0)

    def measure(self, step: Step) -> Mapping[str, Value]:
        """Let the model answer, if that is due."""
        due = self._is_due(step.iteration) and not self._stops.asked(step)
        return self.answer(step.iteration) if due else {}

    def _is_due(self, iteration: int) -> bool:
        """Return whether the prompts are asked after an iteration; 0: before the first."""
        if not self._run.prompts:
            return False
        return iteration == self._last or iteration % self._run.config.evaluation.sample_interval == 0

    def answer(self, iteration: int) -> dict[str, Value]:
        """Let the model answer, tell the callbacks, and return a field of the iteration's record: the seconds it took.

        There is none if it was given up. Then training goes on to its end.
        """
        run, began = self._run, time.perf_counter()
        run.engine.schedule.phases.enter(VALIDATION, "samples")
        try:
            with run.engine.evaluation():
                answers = self._answers()
        except GivenUp:
            self._stops.hear()
            return {}
        finally:
            run.engine.schedule.phases.enter(OTHER)
        asked = zip(run.prompts, answers, strict=True)
        run.callbacks.on_samples(
            callback.Samples(
                iteration,
                [
                    callback.Generation(
                        prompt=prompt.question,
                        answer=run.source.decode_answer(tokens),
                        reference=prompt.reference,
                        images=prompt.pictures,
                        label=prompt.label,
                    )
                    for prompt, tokens in asked
                ],
            )
        )
        seconds = time.perf_counter() - began
        run.say(f"answered {len(answers)} held-out prompts ({seconds:.1f} s): {run.run_dir}/samples/index.html")
        return {"sample_time_s": seconds}

    def _answers(self) -> list[list[int]]:
        """Return the tokens of all answers. The cache of keys and values holds as many prompts as one round of the
        pipeline, so that it stays smaller than what a training step saves. Raises GivenUp.
        """
        run, dims = self._run, self._run.plan.dims
        prompts = [prompt.sample for prompt in run.prompts]
        rows = min(run.config.train.micro_batch_size, -(-len(prompts) // (dims.dp * dims.pp)))
        together = rows * dims.dp * dims.pp
        found: list[list[int]] = []
        for first in range(0, len(prompts), together):
            found += generate(
                run.engine,
                CollateSpec.of(run.config, run.source),
                prompts[first : first + together],
                micro_batch_size=rows,
                max_new_tokens=run.config.evaluation.sample_max_new_tokens,
                stop=run.source.answer_ends,
                give_up=lambda: self._stops.requested,
            )
        return found
