"""Why a network trains badly: measurements of its activations, weights and gradients."""
