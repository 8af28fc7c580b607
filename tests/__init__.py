"""Tests of kvd. `unit` needs one process; `integration` starts daemons; `vllm` runs vLLM's code."""
