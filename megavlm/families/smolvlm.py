"""SmolVLM and Idefics3: SigLIP for any grid, 3×3 or 4×4 pixel shuffle into one linear layer, Llama. Images alone.

A user's image is cut into square tiles and a small copy of the whole, each an image of its own here. Tiles must be
full, as their processors make them where they split images (the default): Transformers hides a padded tile's padding
from attention and still makes features of it, which is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megavlm.arch.image_tokens import tokens_per_grid
from megavlm.config.schema import ModelConfig, ProjectorConfig
from megavlm.data.processors import sizes
from megavlm.data.processors.layout import Layout, Prompt
from megavlm.data.processors.processor import Processor, cut
from megavlm.data.processors.reader import HALF_PIXELS, Json, ProcessorReader, has_only
from megavlm.data.processors.resize import Pixels
from megavlm.data.processors.sizes import Size
from megavlm.errors import UserError
from megavlm.families.shared.chat import NamedTemplate
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.inputs import pixel_values
from megavlm.families.shared.language import language, language_table
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Table, linear
from megavlm.families.shared.vision import idefics3, siglip_table

if TYPE_CHECKING:
    from torch import Tensor

    from megavlm.data.batch import MicroBatch


def config(settings: Settings) -> ModelConfig:
    """SmolVLMConfig, Idefics3Config. Only the outer tie_word_embeddings counts."""
    return ModelConfig(
        vision=idefics3(settings.section("vision_config")),
        projector=ProjectorConfig(kind="linear", pixel_shuffle=settings.get("scale_factor", 2), bias=False),
        language=language(settings.section("text_config"), tied=settings.get("tie_word_embeddings", False)),
        image_token=settings.get("image_token_id", 128257),
    )


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    return {
        **siglip_table(model.vision, prefixes.vision),
        **linear("projector.linear_fc1", f"{prefixes.projector}modality_projection.proj", bias=False),
        **language_table(model.language, prefixes.language, head=prefixes.head),
    }


def inputs(batch: MicroBatch, model: ModelConfig) -> dict[str, Tensor]:
    """Images of one size, as if all belonged to one sample: features follow each other in any case."""
    pixels = {name: images[None] for name, images in pixel_values(batch, model.vision).items()}
    return {"input_ids": batch.text.tokens, **pixels}


@dataclass(frozen=True, kw_only=True)
class SplitTiles(Processor):
    """Cuts the enlarged image into tiles, each announced by its row and column; the image itself is the last tile."""

    edge: int
    tile: int
    split: bool = True
    around: str = "<fake_token_around_image>"
    whole: str = "<global-img>"

    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        tile = self._tile(self.tile, self.tile)
        features = tokens_per_grid(tile.grid, self.projector)
        rows, columns = self._arrangement(sizes.longest_edge((height, width), self.edge))
        texts = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                line_break = "\n" if column == 1 and row > 1 else ""
                texts.append(f"{line_break}{self.around}<row_{row}_col_{column}>")
        texts.append(("\n\n" if rows else "") + self.around + self.whole)
        prompt = Prompt(self.image_token, (*texts, self.around), (features,) * len(texts))
        return Layout((height, width), (tile,) * len(texts), (rows, columns), prompt)

    def views(self, pixels: Pixels, *, images: int = 1) -> list[Pixels]:
        picture = self._resize(pixels, *sizes.longest_edge(pixels.shape[:2], self.edge))
        rows, columns = self._arrangement(picture.shape[:2])
        if not rows:
            return [self._resize(picture, self.tile, self.tile)]
        picture = self._resize(picture, rows * self.tile, columns * self.tile)
        return [*cut(picture, (rows, columns)), self._resize(picture, self.tile, self.tile)]

    def _arrangement(self, size: Size) -> Size:
        """(rows, columns) of tiles for an enlarged picture; (0, 0) where one tile holds it."""
        grid = sizes.whole_tiles(size, self.tile) if self.split else (1, 1)
        return (0, 0) if grid == (1, 1) else grid


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    size, tile = options["size"], options["max_image_size"]
    if not has_only(size, "longest_edge") or not has_only(tile, "longest_edge"):
        raise UserError("size and max_image_size in preprocessor_config.json must give longest_edge, and nothing else")
    return SplitTiles(
        edge=size["longest_edge"], tile=tile["longest_edge"], split=options["do_image_splitting"], **shared
    )


CHAT = NamedTemplate(
    "smolvlm",
    """\
<|im_start|>{% for message in messages %}\
{{ message.role | capitalize }}{{ ':' if message.content[0].type == 'image' else ': ' }}\
{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}\
{{ '<end_of_utterance>\\n' }}\
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}""",
    needs=("<end_of_utterance>",),
)

FAMILY = Family(
    name="smolvlm",
    model_types=("smolvlm", "idefics3"),
    config=config,
    table=table,
    inputs=inputs,
    name_prefixes=(NamePrefixes("model.vision_model.", "model.connector.", "model.text_model."),),
    image_processors=(
        ProcessorReader(
            ("Idefics3", "SmolVLM"),
            {
                **HALF_PIXELS,
                "resample": 1,
                "size": {"longest_edge": 4 * 364},
                "max_image_size": {"longest_edge": 364},
                "do_image_splitting": True,
            },
            build_processor,
        ),
    ),
    chat_template=CHAT,
    published={
        "smolvlm_2b": {
            "scale_factor": 3,
            "vision_config": {
                "num_hidden_layers": 27,
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_attention_heads": 16,
                "image_size": 384,
                "patch_size": 14,
            },
            "text_config": {
                "model_type": "llama",
                "num_hidden_layers": 24,
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "vocab_size": 49155,
                "rms_norm_eps": 1e-5,
            },
        }
    },
    unused=(r".*\.rotary_emb\.inv_freq", r".*\.position_ids"),
)
