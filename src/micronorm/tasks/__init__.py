"""Training problems: data, loss and score of each kind, as the engine asks for them."""
