"""Numbers that say why a network trains badly: tensors in, numbers out."""
