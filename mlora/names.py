"""Other programs' names for the keys of a configuration: taken with a note, or refused with the name to write.

They are the spellings of transformers (old and new), TRL, Axolotl, LLaMA-Factory and Unsloth that mean exactly what a
key here means. A name that means something else elsewhere is refused, never guessed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mlora.types import Faults, Note, UserError

RUN: dict[str, str] = {
    "base_model_name_or_path": "base_model",
    "model_name_or_path": "base_model",
    "model_name": "base_model",
    "torch_dtype": "dtype",
    "gradient_checkpointing": "recompute",
    "use_gradient_checkpointing": "recompute",
}
DTYPES = {"bf16": "dtype", "fp16": "dtype"}  # true or false, so two for one key
ADAPTER: dict[str, str] = {
    "datasets": "dataset",
    "lora_r": "r",
    "lora_rank": "r",
    "lora_target": "target_modules",
    "lora_target_modules": "target_modules",
    "lora_target_linear": "target_modules",
    "peft_layers_to_transform": "layers_to_transform",
    "peft_use_rslora": "use_rslora",
    "peft_use_dora": "use_dora",
    "peft_init_lora_weights": "init_lora_weights",
    "lora_task_type": "task_type",
    "lora_fan_in_fan_out": "fan_in_fan_out",
    "lora_modules_to_save": "modules_to_save",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "warmup_ratio": "warmup_steps",
    "num_epochs": "num_train_epochs",
    "epochs": "num_train_epochs",
    "micro_batch_size": "per_device_train_batch_size",
    "gradient_clipping": "max_grad_norm",
    "optimizer": "optim",
    "adam_eps": "adam_epsilon",
    "random_state": "seed",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "sequence_len": "max_length",
    "cutoff_len": "max_length",
    "model_max_length": "max_length",
    "additional_target": "modules_to_save",
    "lora_model_dir": "init_from",
    "adapter_name_or_path": "init_from",
    "val_set_size": "val_size",
    "test_datasets": "eval_dataset",
    "early_stopping_steps": "early_stopping_patience",
}
DATASET: dict[str, str] = {
    "file_name": "path",
    "data_files": "path",
    "hf_hub_url": "hub",
    "dataset_name": "hub",
    "name": "subset",
    "dataset_config": "subset",
    "num_samples": "max_samples",
    "max_train_samples": "max_samples",
    "formatting": "format",
    "type": "format",
}

_BEST = "the best step is the one with the lowest eval_loss"
_IDLE: dict[str, str] = {  # keys that ask for what is the case anyway, or for what changes nothing here; and why
    key: reason
    for reason, keys in {
        "rows are always packed without padding": "group_by_length packing sample_packing padding_free neat_packing "
        "pad_to_sequence_len eval_sample_packing",
        "rows to evaluate on are packed like the others": "per_device_eval_batch_size eval_batch_size",
        "the engine chooses its own attention": "flash_attn flash_attention sdp_attention xformers_attention "
        "attn_implementation",
        "the engine has its own kernels": "use_liger_kernel enable_liger_kernel lora_mlp_kernel lora_qkv_kernel "
        "lora_o_kernel use_unsloth torch_compile liger_rope liger_rms_norm liger_glu_activation liger_layer_norm "
        "liger_fused_linear_cross_entropy",
        "the tokenizer uses all cores": "dataset_num_proc preprocessing_num_workers dataset_processes",
        "tokens are read from a mapped file": "dataloader_num_workers",
        "tokens are kept under XDG_CACHE_HOME, keyed by content": "dataset_prepared_path",
        "tokens are kept by content, so old ones are never taken for new ones": "overwrite_cache",
        "columns that the format does not know are left out": "remove_unused_columns",
        "what a file is shows in its content": "ds_type",
        "the curves are always drawn": "plot_loss",
        "an evaluation always has token accuracy": "compute_accuracy",
        "a step's loss is the mean over all its target tokens": "average_tokens_across_devices",
        "all that is written is safetensors": "save_safetensors",
        "recompute is one way": "gradient_checkpointing_kwargs",
        "embeddings carry no adapter": "loraplus_lr_embedding",
        "config.json of the model says it": "model_type",
        "the tokenizer's own files say it": "tokenizer_type",
        "every key is checked": "strict",
        "rows to evaluate on are what asks for evaluations": "do_eval",
        "an evaluation generates nothing": "eval_max_new_tokens",
        "processes watch each other": "ddp_timeout",
        "no gradients are exchanged": "ddp_find_unused_parameters",
    }.items()
    for key in keys.split()
}
_FIXED: dict[str, tuple[tuple[object, ...], str]] = {  # the values that ask for what is the case; why no other is taken
    "adapter": (("lora",), "only LoRA adapters are trained; for QLoRA write quantization: nf4 at the top of the file"),
    "finetuning_type": (("lora",), "only LoRA adapters are trained; leave it out"),
    "stage": (("sft",), "supervised fine-tuning is what is there; leave it out"),
    "do_train": ((True,), "mlora train always trains; leave it out"),
    "load_in_4bit": ((False, None), "write quantization: nf4 at the top of the file"),
    "load_in_8bit": ((False, None), "write quantization: int8 at the top of the file"),
    "quantization_bit": ((None,), "write quantization: nf4 or int8 at the top of the file"),
    "quantization_method": (("bnb", "bitsandbytes", None), "write quantization: nf4 or int8 at the top of the file"),
    "use_peft": ((True,), "only LoRA adapters are trained; leave it out"),
    "tf32": ((False, None), "float32 is computed as such; leave it out"),
    "save_only_model": ((False, None), "a checkpoint is what a run goes on from; leave it out"),
    "save_first_step": ((False, None), "write save_steps or save_seconds at the top of the file"),
    "message_property_mappings": (
        ({"role": "role", "content": "content"}, None),
        "a turn has role and content, or from and value; rename them in the file",
    ),
    "neftune_noise_alpha": ((None, 0), "noise on the embeddings is not there; leave it out"),
    "eval_strategy": ((False, "no", "steps"), "write eval_steps: a number, a share of all steps, or a list of shares"),
    "evaluation_strategy": ((False, "no", "steps"), "write eval_steps: a number, a share of all steps, or a list"),
    "save_strategy": (("steps",), "write save_steps or save_seconds at the top of the file"),
    "logging_first_step": ((False, None), "write logging_steps: 1"),
    "logging_strategy": (("steps",), "write logging_steps"),
    "metric_for_best_model": (("eval_loss", "loss"), f"{_BEST}; leave it out"),
    "greater_is_better": ((False, None), f"{_BEST}; leave it out"),
    "label_smoothing_factor": ((0, None), "the loss is plain cross-entropy; leave it out"),
    "lr_scheduler_kwargs": ((None, {}), "the schedules have no more settings; leave it out"),
    "dataloader_drop_last": ((False, None), "no row is dropped: an epoch's last step is smaller; leave it out"),
    "mask_history": ((False, None), "every turn of the assistant is trained; leave it out"),
    "resize_vocab": ((False, None), "embedding and head are frozen; leave it out"),
    "pissa_init": ((False, None), "PiSSA moves part of the frozen weight into the adapter; leave it out"),
    "create_new_adapter": ((False, None), "an adapter goes on from one other, which init_from names; leave it out"),
    "predict_with_generate": ((False, None), "mlora generate answers behind the training; leave it out"),
    "push_to_hub": ((False, None), "upload the exported folder with hf upload; leave it out"),
    "deepspeed": ((None,), "write pipeline: {stages: N} at the top of the file, and start with --nproc N"),
    "fsdp": ((None, [], ""), "write pipeline: {stages: N} at the top of the file, and start with --nproc N"),
    "fsdp_config": ((None, {}), "write pipeline: {stages: N} at the top of the file, and start with --nproc N"),
    "trust_remote_code": ((False, None), "code of a model is never run; leave it out"),
    "train_on_inputs": ((False, None), "write train_on: all inside dataset"),
    "train_on_prompt": ((False, None), "write train_on: all inside dataset"),
    "completion_only_loss": ((True, None), "write train_on: all inside dataset"),
    "assistant_only_loss": ((True, None), "write train_on: all inside dataset"),
}
_OTHER: dict[str, str] = {
    "batch_size": "a step has per_device_train_batch_size × gradient_accumulation_steps rows; write those two",
    "template": "the tokenizer's own chat template is used; another one, as a file, is chat_template inside dataset",
    "dataset_dir": "paths count from the configuration file's folder; write the whole path inside dataset",
    "overwrite_output_dir": "give --overwrite (overwrite=True)",
    "resume_from_checkpoint": "give --resume (resume=…)",
    "use_tensorboard": "write report_to: [tensorboard]",
    "use_wandb": "write report_to: [wandb]",
    "use_mlflow": "write report_to: [mlflow]",
    "wandb_project": "set WANDB_PROJECT in the environment, as for every program that uses W&B",
    "wandb_entity": "set WANDB_ENTITY in the environment, as for every program that uses W&B",
    "mlflow_tracking_uri": "set MLFLOW_TRACKING_URI in the environment, as for every program that uses MLflow",
    "mlflow_experiment_name": "set MLFLOW_EXPERIMENT_NAME in the environment",
    "logging_dir": "TensorBoard's files are in output_dir/tensorboard",
    "wandb_name": "runs are named after output_dir and the adapter",
    "wandb_run_id": "each adapter is a run of its own; report_to.json has their ids",
    "wandb_watch": "only the metrics are logged; leave it out",
    "wandb_log_model": "only the metrics are logged; leave it out",
    "special_tokens": "the tokenizer's own special tokens are used; write them into tokenizer_config.json",
    "tokens": "the tokenizer's own tokens are used; embedding and head are frozen",
    "local_rank": "the launcher numbers the processes; leave it out",
    "nproc": "start with --nproc N, or with torchrun",
    "nproc_per_node": "start with --nproc N, or with torchrun",
    "num_processes": "start with --nproc N, or with torchrun",
    "stages": "write pipeline: {stages: N} at the top of the file",
    "replicas": "write pipeline: {replicas: N} at the top of the file",
    "debug": "mlora check shows the samples as they are trained",
    "s2_attention": "attention is over the whole row; leave it out",
    "eval_table_size": "mlora generate --file answers the rows of a file",
    "use_cpu": "write device: cpu at the top of the file",
    "run_name": "runs are named after output_dir and the adapter",
    "auto_resume_from_checkpoints": "give --resume auto (resume='auto')",
    "loss_watchdog_threshold": "max_nonfinite_steps ends an adapter whose numbers are not finite; leave it out",
    "loss_watchdog_patience": "max_nonfinite_steps ends an adapter whose numbers are not finite; leave it out",
    "plugins": "there are none; leave it out",
    "hub_model_id": "upload the exported folder with hf upload; leave it out",
    "eos_token": "the tokenizer's own end of sequence is used; write another into tokenizer_config.json",
    "dataset_train_split": "write split inside dataset",
    "dataset_test_split": "write eval_dataset: {hub: ID, split: test}",
    "bnb_4bit_compute_dtype": "write dtype at the top of the file",
    "bnb_4bit_quant_type": "write quantization: nf4 or fp4 at the top of the file",
    "bnb_4bit_use_double_quant": "write double_quantization: true at the top of the file",
    "use_bnb_nested_quant": "write double_quantization: true at the top of the file",
    "llm_int8_skip_modules": "write quantization_skip_modules at the top of the file",
    "quantization_config": "write quantization: nf4, fp4, int8 or fp8 at the top of the file",
    "roles": "the usual names of roles are known, such as human, gpt and observation; rename others in the file",
    "evals_per_epoch": "write eval_steps: a number, a share of all steps below 1, or a list of shares",
    "saves_per_epoch": "write save_steps or save_seconds at the top of the file",
    "data_seed": "seed is for rows, initialisation and dropout alike",
    "dataset_text_field": "write columns: {text: body} inside dataset",
    "chat_template_path": "write chat_template inside dataset",
    "roles_to_train": "what the assistant says is trained; train: false in a message leaves that one out",
    "interleave_probs": "write weight beside each path of a list under dataset",
    "mix_strategy": "write weight beside each path of a list under dataset",
    "shards": "write max_samples",
    "field": "write columns, such as columns: {text: body}",
    "field_messages": "write columns, such as columns: {messages: turns}",
}

_FORMATS = {"completion": "text", "chat_template": "messages"}
_OPTIMIZERS = {"adamw_torch_fused": "adamw_torch", "adamw_hf": "adamw_torch"}


def canonical(
    tree: Mapping[Any, Any], aliases: Mapping[str, str], place: str, elsewhere: Mapping[str, str], faults: Faults
) -> dict[Any, Any]:
    """``tree`` under our names. Each other name that is taken gives a ``Note``.

    ``place`` names the block in messages; ``elsewhere`` are keys that belong to another block, with where that is.
    A name that is refused, or given beside ours, is left out and goes to ``faults``, with what to write instead.
    """
    plain: dict[Any, Any] = {}
    for key, value in tree.items():
        where = f"{place}.{key}" if place else str(key)
        with faults:
            if key in aliases:
                name = aliases[key]
                if name in tree or name in plain:
                    raise UserError(f"{where}: is another name of {name}, which is given too; keep one of them")
                plain[name] = _VALUES[key](value, where) if key in _VALUES else value
                _note(f"{where}: read as {name}: {'…' if isinstance(plain[name], list | dict) else plain[name]}")
            elif key in DTYPES and place == "":
                _set_dtype(plain, tree, key, value)
            elif key in _IDLE:
                _note(f"{where}: has no effect: {_IDLE[key]}")
            elif key in _FIXED:
                _check_fixed(key, value, where)
            elif key in elsewhere:
                raise UserError(f"{where}: {elsewhere[key]}")
            elif key in _OTHER and not value:
                _note(f"{where}: has no effect: it asks for nothing")
            elif key in _OTHER:
                raise UserError(f"{where}: unknown key; {_OTHER[key]}")
            else:
                plain[key] = _value(key, value, where)
    return plain


def _note(text: str) -> None:
    warnings.warn(text, Note, stacklevel=4)


def _check_fixed(key: str, value: object, where: str) -> None:
    taken, reason = _FIXED[key]
    if not any(value is one or value == one for one in taken):
        raise UserError(f"{where}: {value!r} is not supported: {reason}")
    _note(f"{where}: has no effect: it is so anyway")


def _set_dtype(plain: dict[Any, Any], tree: Mapping[Any, Any], key: str, value: object) -> None:
    """``bf16`` and ``fp16`` of transformers are one key here."""
    if value not in (True, False, "auto", None):
        raise UserError(f"{key}: expected true or false, found {value!r}; or write dtype: bfloat16")
    if value is not True:
        _note(f"{key}: has no effect: dtype chooses by the device")
    elif "dtype" in tree or "dtype" in plain:
        raise UserError(f"{key}: dtype is given too; keep one of them")
    else:
        plain["dtype"] = {"bf16": "bfloat16", "fp16": "float16"}[key]
        _note(f"{key}: read as dtype: {plain['dtype']}")


def _value(key: str, value: object, where: str) -> object:
    """Another program's word for a value of ours."""
    if key == "optim" and isinstance(value, str) and value in _OPTIMIZERS:
        _note(f"{where}: {value} is computed as {_OPTIMIZERS[value]}")
        return _OPTIMIZERS[value]
    if key == "report_to" and isinstance(value, str):
        return [] if value == "none" else [value]
    if key == "eval_dataset":
        return _one(value, where, "one data set is evaluated on; write its path, or a block with path or hub")
    return value


def _share(value: object, where: str) -> object:
    """A ratio of all steps is a warmup_steps below 1; 1 would there be one step."""
    try:
        ratio = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return value  # the key's own check names it
    if not 0 <= ratio < 1:
        raise UserError(f"{where}: {value} is no share of all steps, 0 to below 1; write warmup_steps for a number")
    return value


def _targets(value: object, where: str) -> object:
    """LLaMA-Factory's ``all`` and names with commas between them."""
    if value in ("all", ["all"]):
        return "all-linear"
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


def _all_linear(value: object, where: str) -> object:
    if value is not True:
        raise UserError(f"{where}: {value!r} leaves the modules open; write target_modules")
    return "all-linear"


def _recompute(value: object, where: str) -> object:
    return True if value == "unsloth" else value


def _one(value: object, where: str, instead: str) -> object:
    """What stands in a list alone."""
    if isinstance(value, list) and len(value) != 1:
        raise UserError(f"{where}: {instead}")
    return value[0] if isinstance(value, list) else value


def _format(value: object, where: str) -> object:
    return _FORMATS.get(value, value) if isinstance(value, str) else value


_VALUES: dict[str, Callable[[object, str], object]] = {
    "warmup_ratio": _share,
    "optimizer": partial(_value, "optim"),
    "lora_target": _targets,
    "lora_target_modules": _targets,
    "lora_target_linear": _all_linear,
    "use_gradient_checkpointing": _recompute,
    "data_files": partial(_one, instead="several files are a list under dataset: [first.jsonl, second.jsonl]"),
    "test_datasets": partial(_value, "eval_dataset"),
    "type": _format,
    "formatting": _format,
}
