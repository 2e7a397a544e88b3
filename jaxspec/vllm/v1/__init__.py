"""Where vLLM has what scripts import from its engine of version 1."""
