"""Ask a Hugging Face folder about an image: `python ask.py FOLDER IMAGE QUESTION`. It uses Transformers alone."""

from __future__ import annotations

import sys

from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor


def main(folder: str, image: str, question: str) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(images=Image.open(image), text=prompt, add_special_tokens=False, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=64, do_sample=False)
    print(processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
