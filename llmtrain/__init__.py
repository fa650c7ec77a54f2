"""llmtrain: train causal language models, exactly, on any number of devices."""
