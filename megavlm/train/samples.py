"""Let the model answer the same held-out prompts while it trains, with the training pipeline and without a trace."""

from __future__ import annotations

import time
from collections.abc import Callable

from megavlm.data.collate import CollateSpec
from megavlm.metrics import callback
from megavlm.metrics.callback import Value
from megavlm.resilience.phases import OTHER, VALIDATION
from megavlm.resilience.signals import StopRequest
from megavlm.train.build import Run
from megavlm.train.generate import GivenUp, generate


class Samples:
    """Asks a run's prompts before its first step, every `--sample-interval` steps and at its end; all ranks call it
    alike.
    """

    def __init__(self, run: Run, stop: StopRequest, say: Callable[[str], None]) -> None:
        self._run, self._stop, self._say = run, stop, say
        self._last = run.config.train.train_iters
        self.stopped = False
        """Whether the last time was given up because a rank was asked to stop."""

    def is_due(self, iteration: int) -> bool:
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
            self.stopped = False
        except GivenUp:
            self.stopped = True
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
        self._say(f"answered {len(answers)} held-out prompts ({seconds:.1f} s): {run.run_dir}/samples/index.html")
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
                give_up=lambda: self._stop.requested,
            )
        return found
