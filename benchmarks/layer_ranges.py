"""Report which layer a training step is in, forward or backward, for megavlm's and Transformers' models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

Enter = Callable[[str], None]  # called with "language.layers.1 forward" where the range of that name begins


def _begin_backward(output: Any, name: str, enter: Enter) -> None:
    tensor = output[0] if isinstance(output, tuple) else output
    if isinstance(tensor, Tensor) and tensor.requires_grad:
        tensor.register_hook(lambda gradient: enter(f"{name} backward"))


def follow_ours(engine: Any, enter: Enter) -> None:
    """Report megavlm's layers by their names; then "gradients" and "optimizer"."""
    from megavlm.model import vlm
    from megavlm.train import engine as engines

    run = vlm.VLMChunk.run_layer

    def followed(self: Any, name: str, hidden: Any, context: Any) -> Tensor:
        enter(f"{name} forward")
        output = run(self, name, hidden, context)
        if output is not hidden:  # an identity's backward is its layer's
            _begin_backward(output, name, enter)
        return output

    finalize = engine.schedule.config.finalize_model_grads_func

    def finalized(*args: Any, **kwargs: Any) -> Any:
        enter("gradients")
        return finalize(*args, **kwargs)

    def followed_range(name: str) -> AbstractContextManager[Any]:
        enter(name)
        return nullcontext()

    vlm.VLMChunk.run_layer = followed  # type: ignore[method-assign]
    engine.schedule.config.finalize_model_grads_func = finalized
    engines.profiler_range = followed_range


def follow_theirs(model: Any, optimizer: Any, enter: Enter) -> None:
    """Report Transformers' layers by megavlm's names; clipping counts as the last layer's backward pass."""
    inner = model.model
    language, vision = inner.language_model, getattr(inner, "vision_tower", None) or inner.visual
    tower = getattr(vision, "vision_model", vision)
    layers = tower.blocks if hasattr(tower, "blocks") else tower.encoder.layers
    projector = vision.merger if hasattr(vision, "merger") else inner.multi_modal_projector
    named = {
        **{f"vision.layers.{i}": layer for i, layer in enumerate(layers)},
        "projector": projector,
        "embedding": language.embed_tokens,
        **{f"language.layers.{i}": layer for i, layer in enumerate(language.layers)},
        "language.norm": language.norm,
        "output": model.lm_head,
    }

    def forward_begins(name: str) -> Callable[..., None]:
        return lambda module, args: enter(f"{name} forward")

    def backward_begins(name: str) -> Callable[..., None]:
        return lambda module, args, output: _begin_backward(output, name, enter)

    for name, module in named.items():
        module.register_forward_pre_hook(forward_begins(name))
        module.register_forward_hook(backward_begins(name))
    optimizer.register_step_pre_hook(lambda *_: enter("optimizer"))


def their_step_without_values(side: Any, shape: Any) -> Callable[[], Any]:
    """Return Transformers' step for tensors without values: integers that it reads come from copies on the host.

    These are grids of images and positions; everything that computes runs as on a GPU.
    """
    import gpu_model
    import torch
    from transformers import masking_utils
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

    on_host = gpu_model.their_inputs(shape)
    masking_utils.is_tracing = lambda tensor=None: False  # fake tensors make it build masks that a GPU run has not

    def moved(function: Callable[..., Any]) -> Callable[..., Any]:
        def moving(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            return found.to(side.device) if isinstance(found, Tensor) else (found[0].to(side.device), *found[1:])

        return moving

    qwen.get_vision_position_ids = moved(qwen.get_vision_position_ids)
    qwen.get_vision_window_index = moved(qwen.get_vision_window_index)
    inner = side.model.model
    if hasattr(inner, "get_rope_index"):
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw")
        positions = [found.to(side.device) for found in inner.get_rope_index(*(on_host[name] for name in names))]
        inner.get_rope_index = lambda *args, **kwargs: tuple(positions)
    params = [param for param in side.model.parameters() if param.requires_grad]

    def step() -> float:
        given = {k: v if k.endswith("grid_thw") else v.to(side.device, non_blocking=True) for k, v in on_host.items()}
        with torch.autocast("cuda", torch.bfloat16):
            loss = side.model(**given, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        side.optimizer.step()
        side.optimizer.zero_grad()
        return float(loss)

    return step
