"""Names (tags) of the numbers of metrics.jsonl in TensorBoard and the trackers, in one table."""

from __future__ import annotations

from collections.abc import Mapping

from megavlm.metrics.callback import Record

_GROUPS = {
    "train": "loss mtp_loss loss_by_source aux_loss balance_loss router_z_loss grad_norm max_attention_logit "
    "qk_clipped_heads learning_rate loss_scale updated skipped_steps epoch",
    "rewards": "reward_chosen reward_rejected reward_margin reward_accuracy chosen_share answer_tokens",
    "data": "tokens trained_tokens image_tokens images samples skipped_samples split_samples packing_efficiency",
    "perf": "data_time_s step_time_s tokens_per_second images_per_second samples_per_second model_tflops_per_device "
    "mfu peak_memory_gib phase_seconds slowest_rank slowest_rank_s slowest_rank_excess save_stall_s save_time_s "
    "eval_time_s eval_time_fraction sample_time_s",
}
TAGS = {name: f"{group}/{name}" for group, names in _GROUPS.items() for name in names.split()}
TAGS |= {"expert_load_max": "experts/load_max", "expert_load_entropy": "experts/load_entropy"}
# Prefixes of names and their replacements; names with a slash are tags already.
PREFIXES = {"eval_": "validation/", "imbalance_": "data/imbalance_"}
_NO_METRIC = ("iteration",)


def tag_of(name: str) -> str:
    """Return the tag of a name in metrics.jsonl; `other/NAME` for a name that is not in the table."""
    if name in TAGS or "/" in name:
        return TAGS.get(name, name)
    for prefix, instead in PREFIXES.items():
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return f"other/{name}"


def tagged(record: Record) -> dict[str, float]:
    """Return the numbers of a record by tag, without None and texts; numbers in a mapping get `TAG/KEY`."""
    found: dict[str, float] = {}
    for name, value in record.items():
        parts = {f"/{part}": each for part, each in value.items()} if isinstance(value, Mapping) else {"": value}
        for part, number in parts.items():
            if name not in _NO_METRIC and isinstance(number, float | int):
                found[tag_of(name) + part] = number
    return found
