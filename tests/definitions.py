"""Definitions in NumPy: what filters make of logits, and how far two arrays lie apart."""

from typing import Any

import numpy as np


def row_probabilities(logits, temperature, top_k, top_p, min_p):
    """Probabilities at a temperature: min_p, then top_k, then top_p, each over what is left. [V] -> [V]"""
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    p = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    p[p < min_p * p.max()] = 0
    if top_k:
        p[p < np.sort(p)[-min(top_k, len(p))]] = 0
    p /= p.sum()
    order = np.argsort(-p)
    above = np.cumsum(p[order]) - p[order]
    p[order[(above >= top_p) & (top_p < 1)]] = 0
    return p / p.sum()


def relative_error(found: Any, expected: np.ndarray) -> float:
    """The largest difference, in units of the largest expected value. NaN stays NaN, which no bound admits."""
    return float(np.max(np.abs(np.asarray(found, np.float64) - expected)) / np.max(np.abs(expected)))
