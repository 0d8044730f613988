"""The GRPO algorithm: advantages, batches, log-probabilities, loss. Tensors in, tensors out; no
I/O, no training framework."""
