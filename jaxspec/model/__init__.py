"""One forward pass of a target: its config, its layers and its cache, as tensors. A family of models is a file: `target` says
what others ask of one, `families` lists them. It may import `checkpoint.layout`, to say how files hold its weights, `checks` and what
lies beside it, and knows nothing of choosing tokens."""
