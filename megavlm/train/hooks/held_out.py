"""Measure the validation loss and generate answers to held-out prompts during training.

Random state, FP8 histories and fp16 loss scale are restored afterwards (`Engine.evaluation`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.arch.objectives import objective_of
from megavlm.data.collate import CollateSpec
from megavlm.data.loader import DataLoader
from megavlm.data.source import HeldOutPrompt
from megavlm.data.survey import DEAR, cheaper
from megavlm.data.types import PADDING, RECORD, SOURCE, StepData
from megavlm.errors import UserError
from megavlm.files import open_new, replace_file
from megavlm.metrics import callback
from megavlm.metrics.callback import Value
from megavlm.objective.gather import SCORES, Representations, Texts, gathered, gathered_members, longest, retrieval_sums
from megavlm.parallel.groups import Groups
from megavlm.parallel.rendezvous import of_all_ranks
from megavlm.resilience.phases import OTHER, VALIDATION
from megavlm.train.generate import GivenUp, generate
from megavlm.train.hooks.hook import RankHook, Step
from megavlm.train.hooks.stops import Stops
from megavlm.train.run import Run


class HeldOutTexts:
    """Embedded texts of all validation batches of this rank; empty except on ranks of the last stage."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._vectors: list[Tensor] = []
        self._members: list[Tensor] = []
        self._records = 0

    def add(self, found: Representations) -> None:
        """Store the embedded texts of a batch."""
        members = found.members.clone()
        members[:, RECORD] += self._records
        self._records += len(members)
        self._vectors.append(found.vectors)
        self._members.append(members)

    def scores(self, names: Sequence[str], device: torch.device) -> dict[str, Value]:
        """Return the mean of each score over all queries of all ranks, and per data set if there are several.

        A query is compared with the documents of its own data set. Every rank calls this and gets the same.
        """
        scores = SCORES
        sums = torch.zeros(len(names), len(scores) + 1, dtype=torch.float64, device=device)
        at, groups = self._groups.coords, self._groups
        if self._vectors:
            length = longest(self._records, groups.dp, device)
            vectors = gathered(torch.cat(self._vectors), length, groups.dp)
            members = gathered_members(torch.cat(self._members), length, groups.dp)
            each_rank = max(len(members) // groups.dp.size(), 1)
            for number in range(len(names) if groups.is_first_tp and at.cp == 0 else 0):  # others have the same
                here = members.masked_fill((members[:, SOURCE] != number)[:, None], PADDING)
                own = torch.nonzero(Texts(here).queries // each_rank == groups.dp.rank()).flatten()
                found = retrieval_sums(vectors, here, own)
                sums[number] = torch.tensor([found[name] for name in (*scores, "queries")], device=device)
        dist.all_reduce(sums)
        means = _means("validation", scores, sums.sum(0))
        for name, own_sums in zip(names, sums, strict=True):
            means |= _means(f"validation/{name}", scores, own_sums) if len(names) > 1 else {}
        return means


def _means(name: str, scores: Sequence[str], sums: Tensor) -> dict[str, Value]:
    *totals, queries = sums.tolist()
    return {f"{name}/{score}": total / max(queries, 1.0) for score, total in zip(scores, totals, strict=True)}


_TOLD = 16  # most numbers in a line; if there are more, the line has only those of all data sets together


class ValidationHook(RankHook):
    """Measures the validation loss of a run every `--eval-interval` steps and at its end, on all ranks."""

    def __init__(self, run: Run, stops: Stops) -> None:
        self._run, self._stops = run, stops
        self._interval = run.config.evaluation.eval_interval
        self._last = run.config.train.train_iters
        self._since = time.perf_counter()  # the end of the last validation
        self._said = self._measured = False  # warned that validation takes long; this process has validated before

    def measure(self, step: Step) -> Mapping[str, Value]:
        """Run the validation if it is due, and return its metrics."""
        due = self._is_due(step.iteration) and not self._stops.asked(step)
        return self.validate(step.iteration) if due else {}

    def _is_due(self, iteration: int) -> bool:
        """Return whether the loss is measured after an iteration."""
        if self._run.validation_loader is None:
            return False
        return iteration == self._last or (self._interval > 0 and iteration % self._interval == 0)

    def validate(self, iteration: int) -> dict[str, Value]:
        """Validate, and return the fields of the iteration's record: loss and perplexity in all and per data set, the
        validation's seconds, and their fraction of the time since the last validation.

        Returns {} if the validation was aborted: a rank was asked to stop, or data cannot be read. Training goes on.
        """
        run, began = self._run, time.perf_counter()
        with run.engine.evaluation():
            held_out = HeldOutTexts(run.engine.groups) if run.engine.schedule.cache is not None else None
            totals = self._totals(iteration, held_out)
            if totals is None:
                return {}
            objective, sums = objective_of(run.config.model), totals.tolist()
            measured = sums[len(sums) - len(objective.measured) :] if objective.measured else []
            sums = sums[: len(sums) - len(measured)]
            found = fields(sums, run.source.validation_names, counted=objective.counted)
            if sums[1]:
                found |= {f"validation/{name}": mean for name, mean in objective.means(measured, sums[1]).items()}
                found |= {"validation/mtp_loss": sums[-1] / sums[1]} if run.config.model.language.mtp_layers else {}
            if held_out is not None:
                found |= held_out.scores(run.source.validation_names, run.backend.device)
            found |= accuracies(run)
        run.engine.schedule.phases.enter(OTHER)
        ended = time.perf_counter()
        seconds, share = ended - began, (ended - began) / (ended - self._since)
        self._since, self._measured = ended, True
        self._tell(found, seconds, share)
        scores = {name: value for name, value in found.items() if isinstance(value, float)}
        run.callbacks.on_validation(callback.Validation(iteration, scores))
        return {**found, "eval_time_s": seconds, "eval_time_fraction": share}

    def _totals(self, iteration: int, held_out: HeldOutTexts | None) -> Tensor | None:
        """Return the sums of `Schedule.losses` over all batches and ranks; None if the validation was aborted.

        `held_out` collects the embedded texts.
        """
        see = (lambda found: None) if held_out is None else held_out.add
        engine, loader, names = self._run.engine, self._run.validation_loader, self._run.source.validation_names
        assert loader is not None, "the caller looks"
        num_sources = len(names) if len(names) > 1 else 0
        sums, number, last = engine.schedule.no_totals(num_sources), 0, False
        while not last:
            number += 1
            engine.schedule.phases.enter(VALIDATION, f"data of batch {number}")
            data = self._next_batch(loader)
            if data is None:
                loader.rewind()
                return None
            engine.schedule.phases.enter(VALIDATION, f"batch {number}")
            if not self._measured:
                self._run.skipped.write(iteration, data.skipped)
            sums += engine.schedule.losses(data.batches, num_sources=num_sources, see=see)
            last = data.last
        if not engine.groups.is_first_tp:
            sums.zero_()  # each tensor-parallel rank has the same
        dist.all_reduce(sums)
        return sums

    def _next_batch(self, loader: DataLoader) -> StepData | None:
        """Return the next batch; None on all ranks if any was asked to stop or cannot read its data.

        So no rank begins a batch that others do not.
        """
        data: StepData | None = None
        failure = ""
        try:
            data = loader.next_step()
        except UserError as error:
            failure = str(error)
        flags = torch.tensor([bool(failure), self._stops.requested], dtype=torch.int32, device=self._run.backend.device)
        dist.all_reduce(flags)
        failed, asked = flags.tolist()
        if asked:
            self._stops.note_request()
        if not failed:
            return None if asked else data
        reason = next(filter(None, of_all_ranks(failure)))
        self._run.say(f"VALIDATION DATA CANNOT BE READ: {reason}. Training goes on")
        return None

    def _tell(self, found: dict[str, Value], seconds: float, share: float) -> None:
        numbers = ((name, value) for name, value in found.items() if isinstance(value, float))
        parts = [f"{name} {value:.4f}" for name, value in numbers if name.startswith("validation/")]
        if len(parts) > _TOLD:
            parts = [part for part in parts if part.count("/") == 1]
        self._run.say(f"{', '.join(parts)} ({seconds:.1f} s, {share:.1%} of the time)")
        if share > DEAR and not self._said and self._interval:
            self._said = True
            self._run.say(f"validation takes {share:.1%} of the time: {cheaper(self._interval, share)}")


def fields(sums: list[float], names: tuple[str, ...], *, counted: str = "tokens") -> dict[str, Value]:
    """Return loss and perplexity in all, and of each data set if there are several, from the sums over all samples.

    `sums` are the total loss and the trained tokens in all, then the loss of each data set, then the tokens of each.
    A data set without trained tokens has no loss. If `counted` is not "tokens", no perplexity is returned.
    """
    found = _loss("validation", *sums[:2]) | {"validation/trained_tokens": round(sums[1])}
    of_tokens, terms = counted == "tokens", "answers" if counted == "answers" else "pairs"
    if not of_tokens:
        found = {"validation/loss": found["validation/loss"], f"validation/{terms}": round(sums[1])} if sums[1] else {}
    apart = zip(sums[2 : 2 + len(names)], sums[2 + len(names) :], strict=False)
    for name, (loss, tokens) in zip(names, apart, strict=False):
        found |= _loss(f"validation/{name}", loss, tokens)
    return found if of_tokens else {name: value for name, value in found.items() if not name.endswith("/perplexity")}


def _loss(name: str, loss: float, tokens: float) -> dict[str, Value]:
    if not tokens:
        return {}
    mean = loss / tokens
    return {f"{name}/loss": mean, f"{name}/perplexity": math.exp(min(mean, 700.0))}


class SamplesHook(RankHook):
    """Generates answers to a run's prompts before its first step, every `--sample-interval` steps and at its end, on
    all ranks.
    """

    def __init__(self, run: Run, stops: Stops) -> None:
        self._run, self._stops = run, stops
        self._last = run.config.train.train_iters

    def begin(self) -> None:
        """Answer the prompts before the first step of a new run."""
        if self._run.position.iteration == 0 and self._is_due(0):
            self.answer(0)

    def measure(self, step: Step) -> Mapping[str, Value]:
        """Answer the prompts if they are due."""
        due = self._is_due(step.iteration) and not self._stops.asked(step)
        return self.answer(step.iteration) if due else {}

    def _is_due(self, iteration: int) -> bool:
        """Return whether the prompts are asked after an iteration; 0: before the first."""
        if not self._run.prompts:
            return False
        return iteration == self._last or iteration % self._run.config.evaluation.sample_interval == 0

    def answer(self, iteration: int) -> dict[str, Value]:
        """Answer the prompts, call the callbacks, and return the seconds as a field of the iteration's record.

        Returns {} if generation was aborted because the run was asked to stop.
        """
        run, began = self._run, time.perf_counter()
        run.engine.schedule.phases.enter(VALIDATION, "samples")
        try:
            with run.engine.evaluation():
                answers = self._answers()
        except GivenUp:
            self._stops.note_request()
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
        pipeline, so that it stays smaller than the activations that a training step saves. Raises GivenUp.
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


def _answers_of(run: Run, questions: Sequence[HeldOutPrompt]) -> list[str]:
    """Return the model's answer to each question; equal on all ranks."""
    source = run.source
    tokens = generate(
        run.engine,
        CollateSpec.of(run.config, source),
        [question.sample for question in questions],
        micro_batch_size=run.config.train.micro_batch_size,
        max_new_tokens=source.max_answer_tokens,
    )
    return [source.decode_answer(ids) for ids in tokens]


def accuracies(run: Run) -> dict[str, Value]:
    """Return the accuracy of each kind of question, on a third of the final evaluation's questions; {} if the data have
    none.
    """
    questions = run.source.questions(max(1, run.config.evaluation.eval_samples // 3))
    if not questions:
        return {}
    hits: dict[str, list[bool]] = {}
    for question, answer in zip(questions, _answers_of(run, questions), strict=True):
        hits.setdefault(question.kind, []).append(answer == question.reference)
    return {f"validation/{kind.replace(' ', '_')}/accuracy": sum(right) / len(right) for kind, right in hits.items()}


def final_evaluation(run: Run) -> None:
    """Answer all held-out questions, if the data have any; rank 0 writes the scores and some examples to RUN_DIR."""
    questions = run.source.questions(run.config.evaluation.eval_samples)
    if not questions:
        return
    run.engine.schedule.phases.enter(VALIDATION, "answers")
    run.say("answering held-out questions …")
    with run.engine.evaluation():
        answers = _answers_of(run, questions)
        shuffled = _answers_of(run, run.source.with_shuffled_images(questions))
    if run.progress is None:
        return
    from megavlm.demo.results import draw_examples, exact_match_table

    table, examples = exact_match_table(questions, answers, shuffled), run.run_dir / "examples.png"
    replace_file(run.run_dir / "evaluation.txt", table + "\n")
    open_new(examples).close()  # the library would follow a link
    draw_examples(questions, answers, examples)
    run.say(table)
    run.say(f"examples: {examples}")
