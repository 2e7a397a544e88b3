"""The bundled pocket models: their corpus, their configs and their recipes."""
