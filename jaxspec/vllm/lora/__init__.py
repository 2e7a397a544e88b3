"""Where vLLM has its adapters."""
