"""How a drafter learns: losses, updates of float32 master weights, and the state that a killed run resumes from. `jaxspec.train` learns
from files, an LLM from the texts that it writes. It knows no requests and no slots; it may import sharding, targets, drafters and what lies
below them."""
