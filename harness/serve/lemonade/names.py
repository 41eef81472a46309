"""The names of a model: Lemonade lists `Tiny`, and knows it as `user.Tiny`; so does vLLM behind it."""


def bare_name(model: str) -> str:
    """A model's name as Lemonade lists it: `user.Tiny` is `Tiny` there."""
    for prefix in ("user.", "extra.", "builtin."):
        if model.startswith(prefix):
            return model.removeprefix(prefix)
    return model
