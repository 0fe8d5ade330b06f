"""Preview the training data: `megavlm preview CONFIG.yaml`, or with the options of a run.

Write one self-contained HTML page: images as the model receives them, the text with its trained tokens highlighted,
how full packed sequences are, the sampling share of each source, and skipped samples with reasons.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from html import escape
from itertools import chain, groupby, islice, zip_longest
from pathlib import Path

from megavlm.command_line.commands import Parser, count, reported
from megavlm.command_line.configuration import configured
from megavlm.config.schema import Config
from megavlm.data.file_source import FilesSource
from megavlm.data.types import EncodedRecord, Sample
from megavlm.data.visuals import seen
from megavlm.errors import UserError
from megavlm.files import write_out
from megavlm.html import document, dot, facts, picture, section, table
from megavlm.inputs.bad_sample import BadSample, Skipped

_MOST_SKIPPED = 5  # examples that are listed for each reason
_SIDE, _FRAME = 2048, 320  # most pixels of the longer side of an image, and of a video frame
_CONTEXT = 8  # tokens that are decoded together with those after them
_LEGEND = (
    '<p class="quiet"><mark>Trained</mark> tokens have a loss; the others are context. '
    '<span class="image">image</span> stands for image tokens, <span class="image">video</span> and '
    '<span class="image">sound</span> for those of a video and a sound.'
    "</p>"
)


@reported("preview")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 1 --tokens FILE has other tokens, 2 an argument or the data is wrong."""
    options, rest = _parser().parse_known_args(argv)
    if rest and not rest[0].startswith("-"):
        is_config = Path(rest[0].partition(",")[0]).suffix in (".yaml", ".yml")
        rest = ["--config" if is_config else "--datasets", *rest]
    config = configured(rest, world=None)  # a preview does not depend on the layout
    if not config.data.datasets:
        raise UserError("there is nothing to preview without --datasets: name your data sets, or a --config that does")
    if options.tokens is not None:
        return _tokens(config, options.tokens, most=options.samples)
    names = ", ".join(source.name or Path(source.path).stem for source in config.data.datasets)
    write_out("--out", options.out, page(config, most=options.samples, title=f"Data of {names}"))
    print(f"wrote {options.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        description="Write an HTML page that shows the training data of a run.",
        epilog="All flags of a run are accepted as well. "
        "A leading argument without -- is taken as --config where it is a YAML file, else as --datasets.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, default=Path("preview.html"), metavar="FILE", help="Write the page here.")
    parser.add_argument("--samples", type=count, default=24, help="Number of samples shown in full.")
    parser.add_argument(
        "--tokens",
        nargs="?",
        const="",
        metavar="FILE",
        help="Print the prompts as tokens in place of a page, or compare lines of a server with them.",
    )
    return parser


def _tokens(config: Config, file: str, *, most: int) -> int:
    """Print the tokens of prompts with single (`served`) and `expanded` image tokens, or compare a file with them.

    The file has lines {"record": …, "tokens": […]}. Return the exit status: 1 if its tokens differ.
    """
    source = FilesSource(replace(config, data=replace(config.data, shuffle=False, validation_split=0.0)))
    if not file:
        for own in islice(source.prompts_as_tokens(), most):
            print(json.dumps(asdict(own)))
        return 0
    given = {}
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines() if Path(file).is_file() else ()):
        try:
            values = json.loads(line)
            given[str(values["record"])] = [int(token) for token in values["tokens"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f'--tokens {file}:{number + 1} is no {{"record": "…", "tokens": […]}}') from error
    found = {
        own.record: own.first_difference(given[own.record], source.tokenizer.decode)
        for own in source.prompts_as_tokens()
        if own.record in given
    }
    if missing := [record for record in given if record not in found]:
        raise UserError(f"--tokens {file}: the data have no prompt {missing[0]}: megavlm preview --tokens lists them")
    if not found:
        raise UserError(
            f"--tokens {file} has no lines: write what megavlm preview --tokens prints, and a server's tokens"
        )
    differing = [difference for difference in found.values() if difference is not None]
    print("\n".join([*differing, f"{len(found) - len(differing)} of {len(found)} prompts have the same tokens"]))
    return 1 if differing else 0


def page(config: Config, *, most: int, title: str) -> str:
    """Return the HTML page, with at most `most` samples in full; text from the data is escaped.

    Raises UserError if the data sets cannot be opened.
    """
    source = FilesSource(config)
    records = source.first_window()
    usable = [record for record in records if record.samples]
    samples, undecodable = _samples(source, usable, most)
    skipped = [*chain.from_iterable(record.skipped for record in records), *undecodable]
    about = facts((("samples looked at", f"{len(records):,}"), *_facts(source, usable)))
    body = [
        f"<header><h1>{escape(title)}</h1>{about}</header>",
        *(f'<p class="warning">{escape(text)}</p>' for text in source.warnings()),
        '<div class="columns">',
        section("Sources", _sources(source, len(records))),
        section("Skipped", skipped_samples(skipped, len(records))),
        "</div>",
        section("Samples", _LEGEND + "".join(samples)),
    ]
    return document(title, body)


def _facts(source: FilesSource, usable: Sequence[EncodedRecord]) -> tuple[tuple[str, str], ...]:
    config, length = source.config, source.config.train.seq_length
    lengths = [sample.cost.length for record in usable for sample in record.samples]
    sequences = source.sequences(lengths)
    return (
        ("sequences", f"{sequences:,} of {length:,} tokens"),
        ("positions filled", f"{sum(lengths) / max(1, sequences * length):.2%}"),
        ("tokens of a sample", f"{min(lengths, default=0):,} to {max(lengths, default=0):,}"),
        ("image processor", type(source.processor).__name__),
        ("chat template", config.data.chat_template),
        ("trained on", config.data.train_on),
        ("end of a turn", repr(source.chat.end_of_turn).strip("'") or "none"),
    )


def _sources(source: FilesSource, read: int) -> str:
    drawn = Counter(source.order.record(number).source for number in range(read))
    rows = (
        (
            f"{dot(number)}{escape(each.name)}",
            f"{each.records:,}",
            f"{each.share:.1%}",
            f"{drawn[number] / max(read, 1):.1%}",
        )
        for number, each in enumerate(source.data_sets())
    )
    return table(("source", "records", "share", "drawn"), rows, numbers=(1, 2, 3))


def skipped_samples(skipped: Sequence[Skipped], read: int) -> str:
    """Return HTML with the number of skipped samples among `read`, and examples for each reason."""
    if not skipped:
        return f'<p class="quiet">Nothing: all {read:,} samples can be used.</p>'
    whole = sum(not skip.partly for skip in skipped)
    parts = [f"<p>{whole:,} of {read:,} samples ({whole / max(read, 1):.1%}).</p>"]
    counts = Counter((str(skip.reason), skip.partly) for skip in skipped)
    for (reason, partly), number in counts.most_common():
        examples = [skip for skip in skipped if (str(skip.reason), skip.partly) == (reason, partly)]
        listed = "".join(
            f"<li><b>{escape(skip.label)}</b> {escape(skip.detail)}</li>" for skip in examples[:_MOST_SKIPPED]
        )
        note = " <span>in part</span>" if partly else ""
        parts.append(f"<details><summary><b>{number:,}</b> {escape(reason)}{note}</summary><ul>{listed}</ul></details>")
    return "".join(parts)


def _samples(source: FilesSource, usable: Sequence[EncodedRecord], most: int) -> tuple[list[str], list[Skipped]]:
    """Return at most `most` samples as HTML, from each data set in turn, and those skipped for broken images."""
    by_source: dict[int, list[EncodedRecord]] = {}
    for record in usable:
        assert record.sample_id is not None, "skipped records have no samples"
        by_source.setdefault(source.label(record.sample_id)[0], []).append(record)
    found: list[str] = []
    bad: list[Skipped] = []
    for record in chain.from_iterable(zip_longest(*by_source.values())):
        if record is not None and len(found) < most:
            try:
                found.extend(list(_in_full(source, record))[: most - len(found)])
            except BadSample as error:
                assert record.sample_id is not None
                bad.append(source.skipped(record.sample_id, error))
    return found, bad


def _in_full(source: FilesSource, record: EncodedRecord) -> Iterator[str]:
    """Yield the HTML of each sample of a record: its images, and its text with the trained tokens marked."""
    assert record.sample_id is not None
    index, label = source.label(record.sample_id)
    samples, model = source.loaded(record), source.config.model
    kinds = {model.audio_token: "sound", model.video_token: "video", source.image_token: "image"}
    for number, sample in enumerate(samples, start=1):
        piece = f", piece {number} of {len(samples)}" if len(samples) > 1 else ""
        nothing = "" if sample.trained.any() else ' <span class="warning">nothing is trained</span>'
        shown = range(len(sample.images) + len(sample.sounds))
        images = "".join(_image(source, sample, place) for place in shown)
        text = marked(
            sample.tokens.tolist(),
            sample.trained.tolist(),
            features={token: kinds[token] for token in source.feature_tokens},
            decode=source.tokenizer.decode,
        )
        yield (
            f"<article><h3>{dot(index)}{escape(label + piece)} "
            f"<span>{escape(source.names[index])} · {len(sample):,} tokens</span>{nothing}</h3>"
            f'{f"<div class=images>{images}</div>" if images else ""}<div class="text">{text}</div></article>'
        )


def marked(
    tokens: Sequence[int],
    trained: Sequence[bool],
    *,
    features: Mapping[int, str],
    decode: Callable[[Sequence[int]], str],
) -> str:
    """Return a sample's text as HTML, with trained text marked and each run of `features` shown as a count.

    These are the tokens of images, videos and sounds, with the name of each. Each stretch of text is decoded together
    with the tokens before it, because a tokenizer's spaces depend on them.
    """
    kinds = [(features.get(token), learnt) for token, learnt in zip(tokens, trained, strict=True)]
    parts, at = [], 0
    for (kind, learnt), same in groupby(kinds):
        begin, at = at, at + len(list(same))
        if kind is not None:
            parts.append(f'<span class="image">{kind} × {at - begin}</span>')
            continue
        before = [token for token in tokens[max(0, begin - _CONTEXT) : begin] if token not in features]
        text = escape(decode([*before, *tokens[begin:at]])[len(decode(before)) :])
        parts.append(f"<mark>{text}</mark>" if learnt else text)
    return "".join(parts)


def _image(source: FilesSource, sample: Sample, number: int) -> str:
    """Return HTML of an image's tiles as the tower receives them, of a video's timed frames, or of a sound."""
    film, pictures = seen(source.processor, sample, number)
    if film is None:
        return f'<div class="tiles">{"".join(picture(pixels, side=_SIDE) for pixels in pictures)}</div>'
    drawn = (
        f"<figure>{picture(pixels, side=_FRAME)}<figcaption>{second:.2f} s</figcaption></figure>"
        for pixels, second in zip(pictures, film.seconds, strict=True)
    )
    height, width = pictures[0].shape[:2]
    about = f"video: {len(pictures):,} frames of {height}×{width} pixels"
    return f'<div class="video"><p class="quiet">{about}</p><div class="film">{"".join(drawn)}</div></div>'
