"""Training of the pocket models: corpus, data, losses, loops."""
