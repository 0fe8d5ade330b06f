"""Write a small data set to fine-tune on: `python make_data.py FOLDER`.

FOLDER gets `images/` with 300 pictures of coloured shapes, `train.json` with a question and an answer about each of 270
of them, as LLaVA's data have them, and `questions.jsonl` with questions about the other 30.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

SIDE = 56
COLOURS = {"red": "#d03030", "green": "#30a040", "blue": "#3050d0", "yellow": "#e0c020"}
SHAPES = ("circle", "square", "triangle")
QUESTION = "What is this?"


def picture(shape: str, colour: str, chance: random.Random) -> Image.Image:
    """Return a shape of some size, somewhere on a pale background."""
    image = Image.new("RGB", (SIDE, SIDE), tuple(chance.randint(215, 255) for _ in range(3)))
    size = chance.randint(28, 44)
    left, top = (chance.randint(2, SIDE - size - 2) for _ in range(2))
    right, bottom = left + size, top + size
    draw, fill = ImageDraw.Draw(image), COLOURS[colour]
    if shape == "circle":
        draw.ellipse((left, top, right, bottom), fill=fill)
    elif shape == "square":
        draw.rectangle((left, top, right, bottom), fill=fill)
    else:
        draw.polygon([(left, bottom), (right, bottom), ((left + right) / 2, top)], fill=fill)
    return image


def main(folder: Path, *, images: int = 300) -> None:
    chance = random.Random(1)
    (folder / "images").mkdir(parents=True)
    train, questions = [], []
    for number in range(images):
        shape, colour, name = chance.choice(SHAPES), chance.choice(list(COLOURS)), f"{number:03}.png"
        picture(shape, colour, chance).save(folder / "images" / name)
        answer = f"This is a {colour} {shape}."
        if number % 10:
            turns = [{"from": "human", "value": f"<image>\n{QUESTION}"}, {"from": "gpt", "value": answer}]
            train.append({"id": number, "image": name, "conversations": turns})
        else:
            questions.append({"image": f"images/{name}", "question": QUESTION, "answers": [answer]})
    (folder / "train.json").write_text(json.dumps(train, indent=1))
    (folder / "questions.jsonl").write_text("".join(json.dumps(record) + "\n" for record in questions))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
