"""Checkpoints: files to arrays and back. The package knows no model class. It may import `checks` and what lies beside it, and
`pallas_kernels.packed`."""

from jaxspec.checkpoint.files import read_config, read_generation_config
from jaxspec.checkpoint.formats import read_quantisation
from jaxspec.checkpoint.hub import resolve
from jaxspec.checkpoint.load import fingerprint, load_weights, read_headers, weight_keys
from jaxspec.checkpoint.save import save_json, save_weights

__all__ = [
    "fingerprint",
    "load_weights",
    "read_config",
    "read_generation_config",
    "read_headers",
    "read_quantisation",
    "resolve",
    "save_json",
    "save_weights",
    "weight_keys",
]
