"""What megavlm takes for granted in megatron-core and in torch's private parts: name, arguments, and why it is used.

Another version that moves one of them fails here, in one line, before it fails in a run.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megavlm.backend import activate

activate()

CORE = "megatron.core."
NEED_TRANSFORMER_ENGINE = {("megatron.core.fp8_utils", "get_fp8_recipe")}  # defined only where it is installed


@dataclass(frozen=True)
class Hook:
    """`name` of `module`, which takes at least `arguments`."""

    module: str
    name: str
    why: str
    arguments: tuple[str, ...] = ()


HOOKS = (
    Hook(CORE + "optimizer", "_get_param_groups", "groups of ZeRO-2 and 3", ("model_chunks", "config")),
    Hook(CORE + "optimizer", "get_megatron_optimizer", "optimizers", ("config", "model_chunks", "config_overrides")),
    Hook(CORE + "optimizer", "ChainedOptimizer.grads_states_parallel_group_is_shared", "the norm of all parts"),
    Hook(CORE + "optimizer", "MegatronOptimizer.get_main_grads_for_grad_norm", "the norm of all parts together"),
    Hook(CORE + "optimizer", "ChainedOptimizer.prepare_grads", "MeanGradientOptimizer's own step"),
    Hook(CORE + "optimizer", "ChainedOptimizer.step_with_ready_grads", "MeanGradientOptimizer's own step"),
    Hook(CORE + "optimizer.optimizer", "param_group_identifier_keys", "what tells parameter groups apart"),
    Hook(
        CORE + "optimizer.distrib_optimizer",
        "DistributedOptimizer._get_main_param_and_optimizer_states",
        "a rank's master weights and moments",
        ("model_param",),
    ),
    Hook(CORE + "optimizer.clip_grads", "l2_norm_impl", "replaced: it waits for each parameter"),
    Hook(CORE + "optimizer.distrib_optimizer", "DistributedOptimizer._get_model_param_range_map", "a rank's run"),
    Hook(
        CORE + "optimizer.distrib_optimizer",
        "DistributedOptimizer._copy_main_params_to_model_params",
        "replaced: it copies one parameter after the other",
    ),
    Hook(CORE + "distributed", "DistributedDataParallel.start_param_sync", "gathers at once", ("force_sync",)),
    Hook(CORE + "distributed", "DistributedDataParallel.zero_grad_buffer", "clears gradients"),
    Hook(CORE + "distributed.data_parallel_base", "_BaseDataParallel", "what a wrapped chunk is to schedules"),
    Hook(
        CORE + "distributed.param_and_grad_buffer",
        "_ParamAndGradBucketGroup.finish_param_sync",
        "waits for what is read",
        ("skip_next_bucket_dispatch",),
    ),
    Hook(CORE + "distributed.param_and_grad_buffer", "dist_all_gather_func", "spared where a rank is alone"),
    Hook(CORE + "distributed.param_and_grad_buffer", "dist_reduce_scatter_func", "spared where a rank is alone"),
    Hook(
        CORE + "distributed.finalize_model_grads",
        "finalize_model_grads",
        "the end of the last backward pass",
        ("model", "num_tokens", "pg_collection", "force_all_reduce"),
    ),
    Hook(
        CORE + "pipeline_parallel.p2p_communication",
        "P2PCommunicator._communicate",
        "gloo sends copies",
        ("tensor_send_next", "wait_on_reqs"),
    ),
    Hook(
        CORE + "pipeline_parallel.p2p_communication",
        "P2PCommunicator._communicate_shapes",
        "shapes are known",
        ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next"),
    ),
    Hook(
        CORE + "pipeline_parallel.schedules",
        "forward_backward_pipelining_with_interleaving",
        "schedules take our communicator",
        ("p2p_communicator", "pg_collection", "collect_non_loss_data"),
    ),
    Hook(CORE + "pipeline_parallel.schedules", "deallocate_output_tensor", "frees what was sent"),
    Hook(
        CORE + "pipeline_parallel.schedules",
        "forward_step",
        "a pass of our own schedules",
        ("data_iterator", "input_tensor", "forward_data_store", "is_first_microbatch", "is_last_stage"),
    ),
    Hook(
        CORE + "pipeline_parallel.schedules",
        "backward_step",
        "a pass of our own schedules",
        ("input_tensor", "output_tensor", "output_tensor_grad", "model_type", "config"),
    ),
    Hook(CORE + "tensor_parallel.random", "_get_cuda_rng_state", "the CPU's generator stands for it"),
    Hook(CORE + "tensor_parallel.random", "_set_cuda_rng_state", "the CPU's generator stands for it"),
    Hook(CORE + "tensor_parallel.random", "CudaRNGStatesTracker.fork", "replaced on a CPU", ("name",)),
    Hook(
        CORE + "tensor_parallel.mappings",
        "_gather_along_first_dim",
        "replaced on a CPU: gloo gathers no uneven parts",
        ("input_", "group", "output_split_sizes", "use_global_buffer"),
    ),
    Hook(
        CORE + "tensor_parallel.mappings",
        "_reduce_scatter_along_first_dim",
        "replaced on a CPU: gloo scatters no uneven parts",
        ("input_", "group", "input_split_sizes", "use_global_buffer"),
    ),
    Hook(CORE + "transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu", "replaced on a CPU", ("tensor",)),
    Hook(CORE + "transformer.moe.moe_utils", "router_gating_linear", "the router in fp32", ("inp", "weight")),
    Hook(CORE + "transformer.moe.moe_utils", "topk_routing_with_score_function", "the choice of experts", ("logits",)),
    Hook(CORE + "transformer.moe.moe_utils", "MoEAuxLossAutoScaler", "gradients of the balance losses"),
    Hook(CORE + "tensor_parallel.layers", "_grad_accum_fusion_available", "whether NVIDIA Apex's kernel was found"),
    Hook(CORE + "tensor_parallel.layers", "ColumnParallelLinear._forward_impl", "emulated FP8", ("input", "weight")),
    Hook(CORE + "tensor_parallel.layers", "RowParallelLinear._forward_impl", "leaves gradients", ("input", "weight")),
    Hook(
        CORE + "transformer.attention",
        "SelfAttention.get_query_key_value_tensors",
        "splits and turns in one step",
        ("hidden_states", "key_value_states", "split_qkv"),
    ),
    Hook(CORE + "parallel_state", "_global_process_group_list", "groups are closed, not only forgotten"),
    Hook(CORE + "fp8_utils", "get_fp8_context", "a layer's FP8 region", ("config",)),
    Hook(
        CORE + "dist_checkpointing.strategies.filesystem_async",
        "_split_by_size_and_type",
        "files of a rank",
        ("bins", "items"),
    ),
    Hook(
        CORE + "dist_checkpointing.strategies.state_dict_saver",
        "save_state_dict_async_plan",
        "what a rank writes",
        ("state_dict", "storage_writer", "process_group", "coordinator_rank", "planner", "cached_ckpt_structure"),
    ),
    Hook(
        CORE + "dist_checkpointing.strategies.torch",
        "_replace_state_dict_keys_with_sharded_keys",
        "what a rank writes",
        ("sharded_state_dict", "keep_only_main_replica"),
    ),
    Hook(CORE + "dist_checkpointing.strategies.torch", "mcore_to_pyt_state_dict", "what a rank writes"),
    Hook(
        CORE + "dist_checkpointing.strategies.fully_parallel",
        "FullyParallelSaveStrategyWrapper.apply_saving_parallelization",
        "ranks deal out what they share",
        ("sharded_state_dict",),
    ),
    Hook(
        CORE + "dist_checkpointing.strategies.fully_parallel",
        "FullyParallelSaveStrategyWrapper",
        "ranks deal out what they share",
        ("strategy", "parallelization_group", "do_cache_distribution"),
    ),
    Hook(
        CORE + "transformer.transformer_layer", "TransformerLayer", "layers", ("config", "submodules", "layer_number")
    ),
    Hook(CORE + "transformer.mlp", "MLPSubmodules", "specs of layers", ("linear_fc1", "linear_fc2", "activation_func")),
    Hook(
        CORE + "transformer.attention",
        "SelfAttentionSubmodules",
        "specs of layers",
        ("linear_qkv", "core_attention", "linear_proj", "q_layernorm", "k_layernorm"),
    ),
    Hook(
        "torch.distributed.fsdp._fully_shard._fully_shard",
        "_get_post_forward_mesh_info",
        "replaced: it makes process groups for each layer",
        ("reshard_after_forward", "mesh_info"),
    ),
    Hook(
        "torch.distributed.fsdp._fully_shard._fsdp_common",
        "HSDPMeshInfo",
        "where second shards of weights are",
        ("mesh", "shard_mesh_dim", "replicate_mesh_dim"),
    ),
    Hook("torch.distributed", "ProcessGroupGloo._Options", "one worker thread in each gloo group"),
    Hook("torch", "_fused_adamw_", "one pass over memory per update"),
    Hook("torch", "ops.aten._flash_attention_forward", "attention over sequences of any lengths in one call"),
    Hook("torch", "_foreach_norm", "norms of many tensors without a wait"),
    Hook("torch", "_foreach_mul_", "scales many tensors in place"),
    Hook("torch", "_foreach_copy_", "copies the histories of FP8 scaling in one launch"),
    Hook("torch.autograd.profiler", "_is_profiler_enabled", "marks cost nothing where nobody traces"),
    Hook("torch.distributed.checkpoint.filesystem", "_StorageInfo", "where a tensor lies in a file"),
    Hook("torch.utils._pytree", "tree_leaves", "tensors of nested arguments"),
    Hook("torch._subclasses.fake_tensor", "FakeTensor", "offloads on a device that is not there"),
    Hook("torch.utils._python_dispatch", "TorchDispatchMode", "counts bytes"),
    Hook("torch.distributed.distributed_c10d", "_get_default_store", "one rank of many speaks"),
)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: f"{hook.module}.{hook.name}")
def test_it_is_there_and_takes_what_we_give(hook: Hook) -> None:
    found: Any = importlib.import_module(hook.module)
    for step in hook.name.split("."):
        assert hasattr(found, step), f"{hook.module}.{hook.name} is gone ({hook.why})"
        found = getattr(found, step)
    if hook.arguments:
        taken = inspect.signature(found).parameters
        assert set(hook.arguments) <= set(taken), f"{hook.name} takes {', '.join(taken)} ({hook.why})"


SOURCES = {path: ast.parse(path.read_text()) for path in (Path(__file__).parents[3] / "megavlm").rglob("*.py")}


def test_every_private_name_of_torch_and_megatron_core_is_in_the_table() -> None:
    known = {f"{hook.module}.{hook.name}" for hook in HOOKS}
    used = {(path.name, name) for path, tree in SOURCES.items() for name in _private_names(tree)}
    assert len(used) > 10
    assert not {(path, name) for path, name in used if name not in known}


def _private_names(tree: ast.AST) -> Iterator[str]:
    """Names that a module imports, or reads from a module that it imports, with an underscore in front of a part."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "megatron"):
            for alias in node.names:
                modules[alias.asname or alias.name] = name = f"{node.module}.{alias.name}"
                if "._" in name:
                    yield name
        elif isinstance(node, ast.Import):
            modules |= {alias.name: alias.name for alias in node.names if alias.name == "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr):
            base, _, rest = ast.unparse(node.value).partition(".")
            if base in modules:
                yield ".".join(filter(None, (modules[base], rest, node.attr)))


def test_every_name_that_is_imported_from_megatron_core_is_there() -> None:
    """Public names: a version that moved one would only be refused where its module is imported."""
    found = {
        (node.module, alias.name)
        for tree in SOURCES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.core")
        for alias in node.names
    }
    assert len(found) > 40
    for module, name in sorted(found - NEED_TRANSFORMER_ENGINE):
        there = importlib.import_module(module)
        assert hasattr(there, name) or importlib.util.find_spec(f"{module}.{name}"), f"{module}.{name} is gone"
