"""An engine of megavlm for verl (https://github.com/volcengine/verl): GRPO and other losses of answers, at any layout.

`VERL_USE_EXTERNAL_MODULES=verl_engine.engine` registers it as the strategy `megavlm` of language models, whose
`engine_config` is a `MegavlmEngineConfig`. verl's loss of a micro-batch gets log-probabilities from any layout, of
packed sequences with images, and its gradients flow back through them. `optimizer_config` has the optimizer's rate,
decay, betas, clipping and warm-up; `MegavlmEngineConfig.flags` all else.

It has the signatures of verl 0.9.1. Tests put stand-ins in the place of verl and of its rollouts, because verl imports
Ray and needs an older Transformers than they do. Its base class, registry, micro-batches and `ppo_loss`, imported by
hand without the rest, gave the same losses and gradient norms. So these were not tried: verl's own loop, workers and
configuration files, Ray, a GPU.

Refused: temperatures, gradients of entropies, videos and tiled images, balance losses of experts, offloading by verl,
references without adapters. A reference model (`forward_only`) holds an optimizer, too, unless flags freeze its parts.
verl's exports of shards and of changed weights alone are not implemented.
"""

from __future__ import annotations

from megavlm.extension import Entry, Extension

EXTENSION = Extension(sources=(Entry("rollouts", "verl_engine.rollouts:Rollouts"),))
