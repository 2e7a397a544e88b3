"""Where vLLM has its parsers of tool calls."""
