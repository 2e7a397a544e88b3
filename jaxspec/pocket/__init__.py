"""The bundled pocket models, each a folder in Hugging Face layout."""
