"""Find the weights of a model, or of parts of it, in Hugging Face folders, and check that names and shapes fit."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megavlm.arch.image_tokens import Tiling
from megavlm.arch.kinds import model_parameters
from megavlm.arch.layers import EMBEDDING, OUTPUT, PATCH_EMBED, kind_of, layer_names, part_of
from megavlm.arch.objectives import HEAD, is_learned_scalar, objective_of
from megavlm.checkpoint.hf.hf_files import DTYPES, HfFolder
from megavlm.checkpoint.hf.quantized import opened
from megavlm.checkpoint.hf.slices import RowReader, slice_of, widened, widest
from megavlm.config.lora_config import is_adapter
from megavlm.config.schema import Config, ExpertsConfig, ModelConfig, ProjectorConfig, VisionConfig
from megavlm.errors import UserError
from megavlm.families import family_of, without_published
from megavlm.families.shared.connectors import decided_of, with_connector
from megavlm.families.shared.family import ALL_PARTS, LANGUAGE_ALONE, Family
from megavlm.families.shared.table import Rename, Shape, Table, fits, matches
from megavlm.rules.defaults import resolve_model
from megavlm.rules.fields import options
from megavlm.storage.cache import local_path

PATCH_WEIGHT = f"{PATCH_EMBED}.proj.weight"
# Options of experts that the run decides, not the folder's model: load balancing in training.
BALANCING = ("aux_loss_coeff", "z_loss_coeff", "router_bias_update_rate", "router_force_load_balancing")
_SLACK = 2  # factor by which tensors may fall short of the described size: missing ones are listed later

SCORE = "score.weight"  # the reward head, as sequence classifiers of Transformers name it


@dataclass(frozen=True)
class Pretrained:
    """A Hugging Face folder, and the parts of the run's model that take their weights from the folder."""

    folder: HfFolder
    family: Family
    model: ModelConfig  # the model of config.json; the sections of parts that the folder lacks mean nothing
    parts: tuple[str, ...]  # the parts of the model that are taken from this folder
    variant: int  # index of the family's name_prefixes that the files use
    table: Table  # the names of all parts that the folder has
    new_channels: str = "zeros"  # model.vision.new_channels
    pools: bool = False  # the run has no vocabulary to predict: the output layer's weight is kept aside, unused

    @property
    def scores(self) -> bool:
        """Return whether the folder is that of a reward model, or of another that classifies sequences."""
        return SCORE in self.folder.tensors

    @property
    def tiling(self) -> Tiling | None:
        """Return the rule by which the model divides an image into tiles; None if it does not divide images."""
        return self.family.tiling(self.folder.settings) if self.family.tiling else None

    @classmethod
    def of(
        cls, path: Path, *parts: str, feature_layer: int | None = None, predictors: int = 0, weights: bool = True
    ) -> Pretrained:
        """Open a folder as the source of `parts`, with the name prefixes that match most of its tensors.

        `feature_layer` takes features from another tower layer than config.json names. Of the multi-token prediction
        layers, the first `predictors` are part of the model. Without `weights`, the folder may have config.json alone,
        and the result may lack a table of tensors. Raises UserError if the folder's architecture lacks one of the
        parts or some of the `predictors`, if its weights are quantized in a way that cannot be read, or if they are far
        fewer than described.
        """
        folder = opened(path, weights=weights)
        family = family_of(folder.settings)
        is_whole = parts == ALL_PARTS and family.parts == LANGUAGE_ALONE  # its model has no vision encoder
        if missing := [part for part in parts if part not in family.parts and not is_whole]:
            raise UserError(
                f"{path} is a {family.name} checkpoint, which has no {' and no '.join(missing)}: give a whole VLM to "
                "--init-from, or compose one with --vision-from and --language-from"
            )
        model = family.config(folder.settings)
        if model.audio.num_layers and parts not in (ALL_PARTS, LANGUAGE_ALONE):
            raise UserError(
                f"{path} has an audio encoder, which would be left out: give the whole model to --init-from, or name "
                "another folder for the vision encoder and the projector"
            )
        if feature_layer is not None:
            model = replace(model, vision=replace(model.vision, feature_layer=feature_layer))
        if predictors > (most := family.predictors.most if family.predictors is not None else 0):
            raise UserError(
                f"model.language.mtp_layers {predictors} is more than the {most} such layers that are known of "
                f"{family.name}, the model of {path}: set it to {most}"
            )
        model = replace(model, language=replace(model.language, mtp_layers=predictors))
        if not folder.files:
            return cls(folder, family, model, parts, 0, {})
        shapes = {name: info.shape for name, info in folder.tensors.items()}
        where = f"complete the files of {path}, or correct its config.json"
        if family.partial:
            check_connector(decided_of(folder.settings), shapes.values(), where=where)
        else:
            check_size(model, parts, shapes.values(), where=where)
        tables = [family.table(model, prefixes) for prefixes in family.name_prefixes]
        best = max(range(len(tables)), key=lambda number: matches(tables[number], shapes))
        head = family.name_prefixes[best].head
        tied_to = copies(family, best, model, shapes).get(head) if model.language.tie_embeddings else None
        if tied_to is not None and tied_to in shapes and folder.apart(head, tied_to):
            # Transformers 5 saves such folders, and does not tie what differs when it loads them.
            model = replace(model, language=replace(model.language, tie_embeddings=False))
            tables[best] = family.table(model, family.name_prefixes[best])
        return cls(folder, family, model, parts, best, tables[best])

    def provides(self, key: str) -> bool:
        """Return whether the run takes the weight with the global name `key` from this folder."""
        there = key in self.table or not (self.family.partial or is_learned_scalar(key))
        return part_of(key) in self.parts and not is_adapter(key) and there

    @property
    def unused(self) -> list[str]:
        """Return the names of the folder's tensors that the model does not use."""
        names = _names(self.table) | self.copies.keys()
        return [name for name in self.folder.tensors if name not in names]

    @property
    def copies(self) -> dict[str, str]:
        """Return {copy: original} for the folder's tensors that repeat another tensor (`copies`)."""
        return copies(self.family, self.variant, self.model, self.folder.tensors)

    def problems(self) -> list[str]:
        """Return a line for each missing, surplus or integer tensor, and each copy that differs from its original.

        Raises UserError for a reward model whose vocabulary the model would use.
        """
        found = self.folder.tensors
        if self.scores and HEAD not in self.table and "language" in self.parts:
            raise UserError(
                f"{self.folder.path} is a reward model, which has trained a score and no vocabulary: megavlm logprobs "
                "writes the scores of answers, and --objective reward trains it on"
            )
        wanted = {key: rule for key, rule in self.table.items() if self.provides(key)}
        missing = [f"missing {name}" for name in sorted(_names(wanted) - found.keys())]
        known = [re.compile(pattern) for pattern in self.family.unused]
        if self.family.predictors is not None and not self.model.language.mtp_layers:
            known.append(re.compile(self.family.predictors.names))
        if self.pools:
            known.append(re.compile(re.escape(self.family.name_prefixes[self.variant].head)))
        surplus = [name for name in self.unused if not any(pattern.fullmatch(name) for pattern in known)]
        untied = [
            f"{name} differs from {original}, "
            + (
                "to which tie_word_embeddings ties it: say false in config.json"
                if name == self.family.name_prefixes[self.variant].head
                else "which it repeats in published models: leave model.language.mtp_layers at 0"
            )
            for name, original in self.copies.items()
            if "language" in self.parts and original in found and not self.folder.same(name, original)
        ]
        integers = [
            f"{name} is of type {found[name].dtype}, which holds no weights"
            for name in sorted(_names(wanted) & found.keys())
            if not DTYPES[found[name].dtype].is_floating_point
        ]
        return missing + integers + [f"surplus {name}" for name in surplus] + untied

    def wrong_shapes(self, needed: dict[str, Shape]) -> list[str]:
        """Return a line for each tensor with a wrong shape; `needed` has the shapes of weights by global name."""
        found = self.folder.tensors
        return [
            f"{name} is {list(found[name].shape)} where {key} needs {list(shape)}"
            for key in needed.keys() & self.table.keys()
            if self.provides(key)
            for name, shape in self.table[key].hf_shapes(needed[key]).items()
            if name in found and not fits(found[name].shape, shape)
        ]

    def dtype_of(self, key: str) -> torch.dtype:
        """Return the type of a megavlm weight's tensors in the files; for several, one that represents all."""
        return widest(DTYPES[self.folder.tensors[name].dtype] for name in self.table[key].hf_names)

    def widens(self, key: str, config: Config) -> bool:
        """Return whether a weight is the patch embedding and the run's number of image channels is not the folder's."""
        return key == PATCH_WEIGHT and config.model.vision.in_channels != self.model.vision.in_channels

    def read_slice(self, key: str, real: Shape, index: tuple[slice, ...], folder: RowReader | None = None) -> Tensor:
        """Return the slice `index` of a megavlm weight, in the files' type.

        `real` is the weight's shape without padding; elements of the slice beyond it are zeros. If `folder` is given,
        it reads the rows in place of this object's folder.
        """
        rule, own, folder = self.table[key], self.model.vision.in_channels, folder or self.folder
        if key != PATCH_WEIGHT or (width := math.prod(rule.hf_shapes(real)[rule.hf_names[0]][1:])) == real[1]:
            return slice_of(folder, rule, real, index)
        narrow = slice_of(folder, rule, (real[0], width), (index[0], slice(0, width)))
        wide = widened(narrow, own, real[1] * own // width, repeat=self.new_channels == "repeat")
        return wide[:, index[1]]


def copies(family: Family, variant: int, model: ModelConfig, names: Container[str]) -> dict[str, str]:
    """Return {copy: original} for those `names` that are copies of another tensor.

    Copies are a tied output weight, and the embedding and output weights of multi-token prediction layers.
    """
    prefixes = family.name_prefixes[variant]
    table = family.table(model, prefixes)
    found = {} if family.predictors is None else family.predictors.copies(model, prefixes)
    if model.language.tie_embeddings:
        found[prefixes.head] = table[f"{EMBEDDING}.word_embeddings.weight"].hf_names[0]
    return {name: original for name, original in found.items() if name in names}


def with_head(table: Table, model: ModelConfig) -> Table:
    """Return the table without the weight of the output layer, which models that pool do not have, and with that of a
    reward head.
    """
    rest = {key: rule for key, rule in table.items() if kind_of(key) != OUTPUT}
    return rest | ({HEAD: Rename(SCORE)} if objective_of(model).scores else {})


def _names(table: Table) -> set[str]:
    return {name for rule in table.values() for name in rule.hf_names}


def pretrained_of(config: Config, *, weights: bool = True) -> list[Pretrained]:
    """Return the folders of --init-from, --vision-from, --language-from and --projector-from, with the parts taken
    from each.

    Without `weights`, a folder may have config.json alone, and no weights are downloaded from the hub.
    """
    folders = _named_folders(config, weights)
    if not objective_of(config.model).pools:
        return folders
    return [replace(each, pools=True, table=_with_own_head(each, config.model)) for each in folders]


def _with_own_head(pretrained: Pretrained, model: ModelConfig) -> Table:
    table = with_head(pretrained.table, model)
    return {key: rule for key, rule in table.items() if key != HEAD or pretrained.scores}


def _named_folders(config: Config, weights: bool) -> list[Pretrained]:
    options, vision = config.checkpoint, config.model.vision

    def found(place: str, option: str, *parts: str, **chosen: Any) -> Pretrained:
        return Pretrained.of(local_path(place, option, weights=weights), *parts, weights=weights, **chosen)

    if options.init_from is not None:
        if any((options.vision_from, options.language_from, options.projector_from)):
            raise UserError(
                "--init-from brings a whole VLM: leave out --vision-from, --language-from and --projector-from"
            )
        depths = config.model.language.mtp_layers
        whole = found(options.init_from, "--init-from", *ALL_PARTS, predictors=depths)
        return [replace(whole, new_channels=vision.new_channels)]
    pretrained_list = []
    if options.vision_from is not None:
        chosen = vision.feature_layer if vision.feature_layer != VisionConfig().feature_layer else None
        tower = found(options.vision_from, "--vision-from", "vision", feature_layer=chosen)
        pretrained_list.append(replace(tower, new_channels=vision.new_channels))
    if options.language_from is not None:
        pretrained_list.append(found(options.language_from, "--language-from", "language"))
    if options.projector_from is not None:
        pretrained_list.append(found(options.projector_from, "--projector-from", "projector"))
    return pretrained_list


def with_pretrained_model(config: Config, *, weights: bool = True) -> Config:
    """Return the configuration with the model sizes of the pretrained folders, so that nobody needs to type them.

    Without `weights`, the folders need no more than config.json.

    Raises UserError if an option contradicts a folder. `model.vision.feature_layer` may choose another layer.
    """
    model = without_published(config).model  # the folders decide
    for pretrained in pretrained_of(config, weights=weights):
        if pretrained.family.partial:
            model = replace(model, projector=_connector(model.projector, pretrained))
            continue
        for part in pretrained.parts:
            found = getattr(pretrained.model, part)
            if part == "vision":
                found = _with_channels(found, model.vision)
            _agree(part, getattr(model, part), found, pretrained)
            model = replace(model, **{part: found})
        if "language" in pretrained.parts:
            experts = _experts(model.experts, pretrained)
            _agree("experts", model.experts, experts, pretrained)
            model = replace(model, experts=experts)
        if pretrained.parts == ALL_PARTS:
            _agree("audio", model.audio, pretrained.model.audio, pretrained)
            model = replace(model, audio=pretrained.model.audio)
        if "projector" in pretrained.parts:
            whole = pretrained.model
            model = replace(
                model,
                audio_token=whole.audio_token,
                image_token=whole.image_token,
                video_token=whole.video_token,
                video_steps_per_second=whole.video_steps_per_second,
                canvas_tokens=whole.canvas_tokens,
            )
    return replace(config, model=model)


def _with_channels(found: VisionConfig, given: VisionConfig) -> VisionConfig:
    """Return a folder's tower `found`, with the run's number of image channels if it is larger."""
    if given.in_channels <= found.in_channels:
        return found
    return replace(found, in_channels=given.in_channels, new_channels=given.new_channels)


def _connector(given: ProjectorConfig, pretrained: Pretrained) -> ProjectorConfig:
    """Return the projector with the connector of a folder, whose config.json decides the sizes."""
    found = with_connector(given, pretrained.folder.settings)
    if given.kind not in (ProjectorConfig().kind, found.kind):
        raise UserError(
            f"--projector-kind {given.kind} contradicts {pretrained.folder.path}, which has {found.kind}: leave it out"
        )
    own, decided = (getattr(each.connectors, found.kind, each) for each in (given, found))
    # An MLP's options are the projector's own.
    _agree("projector" if decided is found else f"projector.connectors.{found.kind}", own, decided, pretrained)
    return found


def _experts(given: ExpertsConfig, pretrained: Pretrained) -> ExpertsConfig:
    """Return the folder's mixture of experts, with the load balancing options (`BALANCING`) that the run has set."""
    unset = ExpertsConfig()
    said = {name: getattr(given, name) for name in BALANCING if getattr(given, name) != getattr(unset, name)}
    return replace(pretrained.model.experts, **said)


def _agree(section: str, given: Any, found: Any, pretrained: Pretrained) -> None:
    if given in (type(given)(), found):  # not set, or read from the run's own config.yaml
        return
    names = {option.key: option.name for option in options()}
    for name, value in vars(found).items():
        key, wanted = f"model.{section}.{name}", getattr(given, name)
        if key in names and wanted not in (value, getattr(type(given)(), name)):
            raise UserError(
                f"{names[key]} {wanted} contradicts {pretrained.folder.path}, which has {value}: "
                "leave it out, the folder decides"
            )


def refuse(problems: Iterable[str], what: str) -> None:
    """Raise a UserError that begins with `what` and lists the first 40 problems, if there are any."""
    listed = list(problems)
    if listed:
        shown = "\n  ".join(each if each.isprintable() else ascii(each) for each in listed[:40])
        more = f"\n  … and {len(listed) - 40} more" if len(listed) > 40 else ""
        raise UserError(f"{what}: {len(listed)} tensors do not fit, nothing was written\n  {shown}{more}")


def check_size(model: ModelConfig, parts: Collection[str], shapes: Collection[Shape], *, where: str) -> None:
    """Raise UserError if the `parts` of a model are far larger than all tensors, whose shapes are `shapes`.

    Settings may each be plausible, and describe terabytes together. `where` names the files and the remedy.
    """
    layers = sum(getattr(model, part).num_layers for part in ("vision", "language") if part in parts)
    if layers > _SLACK * len(shapes):  # each layer has several
        raise UserError(f"a model of {layers} layers is described, and there are {len(shapes)} tensors: {where}")
    model = resolve_model(model)
    described = sum(model_parameters(name, model) for name in layer_names(model) if part_of(name) in parts)
    there = sum(map(math.prod, shapes))
    if described > _SLACK * there:
        raise UserError(f"a model of {described:,} parameters is described, and there are {there:,}: {where}")


def check_connector(decided: Mapping[str, Any], shapes: Collection[Shape], *, where: str) -> None:
    """Raise UserError if a size in a connector's config.json is larger than all dimensions of its folder's tensors.

    A connector's size also depends on the widths of tower and language model, which its folder does not have.
    """
    largest = max([len(shapes), *(size for shape in shapes for size in shape)], default=0)
    for name, value in decided.items():
        if isinstance(value, int) and value > largest:
            raise UserError(f"{name} {value} is described, and no tensor is larger than {largest}: {where}")
