"""From logits to a token: edits, filters, noise and the choice. The package may import `collectives`, `trees` and `checks`."""

from jaxspec.sampling.choice import PLAIN, Needs, Sampling, best, choose, draw, probabilities, seed_words

__all__ = ["PLAIN", "Needs", "Sampling", "best", "choose", "draw", "probabilities", "seed_words"]
