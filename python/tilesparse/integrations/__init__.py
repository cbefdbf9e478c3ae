"""Support for Transformers, PEFT, Accelerate, Diffusers and vLLM."""
