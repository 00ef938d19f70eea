import copy
import pickle

import torch
from torch import nn

from micronorm.nn.passive_hook import PassiveHook


def test_the_hook_changes_no_output_and_a_copied_model_is_not_observed():
    seen = []
    layer = nn.ReLU()
    layer.register_forward_hook(PassiveHook(lambda module, inputs, output: seen.append(output)))
    x = torch.tensor([-1.0, 2.0])
    assert torch.equal(layer(x), torch.relu(x))
    assert len(seen) == 1
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), torch.relu(x))
    assert len(seen) == 1
