"""Where vLLM has its parsers of thoughts."""
