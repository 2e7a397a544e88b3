"""Where vLLM has its metrics."""
