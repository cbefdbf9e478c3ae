"""Support for Transformers, PEFT, Accelerate and vLLM."""
