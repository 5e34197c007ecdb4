"""For each framework: the version with which its adapter was tested, and the hooks that the adapter needs.

A hook is a class or function of the framework that an adapter replaces or calls. Any release of the framework may
change its hooks. The hooks are checked when the adapter is imported, so that a difference ends the run at the import
and not at the first step. Version numbers are not compared, because every version that has all the hooks should work.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager

RUN_WITH = {
    "TRL": "trl 1.16.0",
    "AsyncGRPO": "trl 1.16.0",
    "verl": "verl 0.9.1, TransferQueue 0.1.11",
    "TransferQueue": "TransferQueue 0.1.11",
    "slime": "THUDM/slime at 624b824a89",
    "Miles": "radixark/miles at 31f1ca961a",
    "SkyRL": "NovaSky-AI/SkyRL at a9564572eb",
}
"""Name of a framework -> the version with which its adapter was tested."""
_SAMPLE = "Sample(tokens, response_length, rollout_log_probs, loss_mask, reward, status, index, ...)"
HOOKS: dict[str, str] = {
    "TRL": """
        trl:GRPOTrainer._generate(prompts)
        trl:GRPOTrainer._generate_and_score_completions(inputs)
        trl:GRPOTrainer._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        trl:GRPOTrainer._get_per_token_logps_and_entropies(input_ids, attention_mask, logits_to_keep, batch_size, ...)
        """,
    "AsyncGRPO": """
        trl.experimental.async_grpo:AsyncGRPOTrainer(rollout_worker, weight_transfer, callbacks, ...)
        trl.experimental.async_grpo.async_grpo_trainer:DataCollatorForRollout.torch_call(examples)
        trl.experimental.async_grpo.async_rollout_worker:RolloutSample(input_ids, completion_mask, old_log_probs, ...)
        """,
    "verl": """
        verl.trainer.ppo.v1.replay_buffer:ReplayBuffer.sample(global_steps, partition_id, batch_size)
        verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync.sample(global_steps, partition_id, batch_size)
        transfer_queue:kv_batch_get(keys, partition_id, select_fields, ...)
        transfer_queue:kv_batch_put(keys, partition_id, fields, tags, ...)
        """,
    "verl: agent loop": """
        verl.trainer.ppo.checkpoint_callback:CheckpointCallback.on_save(trainer, global_step, checkpoint_dir, ...)
        verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ.generate_sequences(prompts)
        verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ.__ray_metadata__.modified_class._run_prompt(prompt, ...)
        verl.trainer.ppo.v1.agent_loop_tq:tq.async_kv_batch_put(keys, partition_id, fields, tags, ...)
        verl.trainer.ppo.v1.agent_loop_tq:tq.async_kv_put(key, partition_id, fields, tag, ...)
        transfer_queue:kv_list(partition_id)
        """,
    "TransferQueue": """
        transfer_queue.storage.managers.base:KVStorageManager(controller_info, config, zmq_context)
        transfer_queue.storage.managers.base:KVStorageManager.put_data(data, metadata, data_parser)
        transfer_queue.storage.managers.base:KVStorageManager.get_data(metadata)
        transfer_queue.storage.managers.base:KVStorageManager.clear_data(metadata)
        transfer_queue.storage.managers.base:KVStorageManager.save_checkpoint(checkpoint_dir)
        transfer_queue.storage.managers.base:KVStorageManager.load_checkpoint(checkpoint_dir)
        transfer_queue.storage.managers.base:KVStorageManager.notify_data_update(partition_id, global_indexes, ...)
        transfer_queue.storage.managers.base:KVStorageManager._notify_and_wait(request_msg)
        transfer_queue.storage.managers.base:KVStorageManager._merge_tensors_to_tensordict(metadata, values)
        transfer_queue.utils.zmq_utils:ZMQRequestType.SAVE_CONTROLLER_CHECKPOINT
        transfer_queue.utils.zmq_utils:ZMQRequestType.LOAD_CONTROLLER_CHECKPOINT
        transfer_queue.utils.zmq_utils:ZMQRequestType.GET_PARTITION_META
        """,
    "slime": f"""
        slime.rollout.base_types:RolloutFnTrainOutput(samples, metrics, ...)
        slime.utils.types:Sample.Status.ABORTED
        slime.utils.types:{_SAMPLE}
        """,
    "Miles": f"""
        miles.rollout.fully_async_data_buffer:DataBufferConstructorInput(args, unused_handler_fn, ...)
        miles.rollout.fully_async_data_buffer:DataBufferInput(prompt_group, group, ...)
        miles.utils.types:{_SAMPLE}
        """,
    "SkyRL": """
        skyrl.train.fully_async_trainer:FullyAsyncRayPPOTrainer._collect_generation_mini_batch
        skyrl.train.fully_async_trainer:FullyAsyncRayPPOTrainer.load_checkpoints
        skyrl.train.fully_async_trainer:GeneratedOutputGroup(generator_output, global_step_when_scheduled, ...)
        """,
}
"""Name of a framework -> its hooks. Each line is a hook: `module:name`, or `module:name(parameters)` without `self`.

The function must have exactly these parameters in this order. If the last one is "...", the function may have further
parameters, and their order does not matter. "verl: agent loop" has the hooks of a part of verl's adapter that can be
used without the rest."""


@contextmanager
def hooks_of(framework: str) -> Iterator[None]:
    """Checks hooks, then runs the block, which imports from the framework. `framework`: a key of HOOKS.

    Raises ImportError if a hook or an import is missing or different. The error names this difference and the remedy.
    """
    try:
        for line in HOOKS[framework].splitlines():
            hook = line.strip()
            if hook:
                _check_hook(hook)
        yield
    except (ImportError, AttributeError) as error:
        raise mismatch(framework.partition(":")[0], error) from error


def _check_hook(hook: str) -> None:
    """Raises ImportError or AttributeError if the framework lacks a hook, or if its parameters differ."""
    name, _, expected = hook.rstrip(")").partition("(")
    function = pkgutil.resolve_name(name)
    if not expected:  # the hook is written without its parameters
        return
    parameters = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
    expected_parameters = expected.split(", ")
    if parameters == expected_parameters:
        return
    others_allowed = expected_parameters[-1] == "..."
    missing = set(expected_parameters) - {*parameters, "..."}
    if missing or not others_allowed:
        raise AttributeError(f"{name} takes ({', '.join(parameters)}), not ({expected})")


def mismatch(framework: str, difference: object) -> ImportError:
    """The error for an installed framework that differs from the version that its adapter was tested with."""
    return ImportError(
        f"the adapter for {framework} was run with {RUN_WITH[framework]}, and what is installed differs: {difference}. "
        f"Install what it was run with, or a newer replay-server"
    )
