"""kvd: a sidecar daemon that moves vLLM KV cache between prefill and decode engines."""

__version__ = "0.1.0"
