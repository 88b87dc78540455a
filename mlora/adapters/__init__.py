"""LoRA adapters: targets, parameters, optimizers."""
