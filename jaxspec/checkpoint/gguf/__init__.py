"""GGUF files, llama.cpp's: a model's weights in blocks of a few bits, with its config and its tokenizer."""

from jaxspec.checkpoint.gguf.file import chosen, is_gguf, is_model, names_of_parts
from jaxspec.checkpoint.gguf.folder import folder_of, model_in, read_model

__all__ = ["chosen", "folder_of", "is_gguf", "is_model", "model_in", "names_of_parts", "read_model"]
