"""Loops written by others commit without a line of ours."""

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import micronorm as mn
from micronorm.convert import calibration_callback
from tests.laws.ranks import fsdp_step, launch
from tests.networks import SmallResNet, assert_same_state, samples
from tests.tolerances import assert_close_to_max, tolerance


def estimates(model):
    return {k: v for k, v in model.state_dict().items() if "running" in k}


def plain(model, make_optimizer, steps=2, cut=8):
    """The loop everybody writes, as the reference."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters())
    for k in range(steps):
        x, labels = samples(torch.float32, seed=k)
        optimizer.zero_grad()
        for xs, ys in zip(x.split(cut), labels.split(cut), strict=True):
            (F.cross_entropy(model(xs), ys, reduction="sum") / len(x)).backward()
        optimizer.step()
    return model


@pytest.fixture
def model():
    return SmallResNet(weight=mn.WS())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


OPTIMIZERS = {
    "SGD": sgd,
    "foreach AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_torch_commit(model, name):
    # The first step's forwards see the same parameters, so all optimizers agree on its estimates.
    trained = plain(model, lambda p: OPTIMIZERS[name](p), steps=1)
    expected = plain(model, sgd, steps=1)
    assert_same_state(estimates(trained), estimates(expected), tol=tolerance("one_step", torch.float32))
    assert any((v != 0).all() for v in estimates(trained).values())


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")  # LBFGS of torch 2.8
def test_lbfgs_commits_once_per_step_by_all_its_evaluations():
    norm = mn.nn.BatchChannelNorm(4, 2, rate=0.5).double()
    optimizer = torch.optim.LBFGS(norm.parameters(), lr=0.1, max_iter=4)
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64) + 2
    target = torch.randn_like(x)
    evaluations = 0

    def closure():
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        loss = F.mse_loss(norm(x), target)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert evaluations > 1
    # every evaluation saw the same x, so their mean is that of one
    assert torch.allclose(norm.running_mean, 0.5 * x.mean((0, 2, 3)))
    assert norm._window.forwards == 0


def test_an_optimizer_that_steps_another_commits_once():
    """Sharpness-aware minimization: the outer optimizer shares its groups with the one it steps."""

    class SAM(torch.optim.Optimizer):
        def __init__(self, parameters, base):
            self.base = base
            super().__init__(parameters, {"lr": 0.1})
            self.param_groups = base.param_groups

        def step(self, closure: Any = None) -> Any:
            assert closure is not None
            loss = closure()
            self.base.step()
            return loss

    norm = mn.nn.BatchChannelNorm(4, 2).double()
    norm.warm(4)
    optimizer = SAM(norm.parameters(), sgd(norm.parameters()))
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64) + 2

    def closure():
        loss = norm(x).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert torch.allclose(norm.running_mean, 0.1 * x.mean((0, 2, 3)))
    assert norm.blend == 0.25


@pytest.mark.slow  # compiles
def test_a_compiled_optimizer_step_commits(model):
    twin = copy.deepcopy(model)
    expected = plain(model, sgd)
    optimizer = sgd(twin.parameters())
    compiled = torch.compile(optimizer.step, backend="aot_eager")
    for k in range(2):
        x, labels = samples(torch.float32, seed=k)
        optimizer.zero_grad()
        for xs, ys in zip(x.split(8), labels.split(8), strict=True):
            (F.cross_entropy(twin(xs), ys, reduction="sum") / len(x)).backward()
        compiled()
    assert_same_state(estimates(twin), estimates(expected), tol=tolerance("one_step", torch.float32))


def test_accelerate_commits_once_per_accumulated_step(model):
    accelerate = pytest.importorskip("accelerate")
    expected = plain(model, sgd)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    net, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    for k in range(2):
        x, labels = samples(torch.float32, seed=k)
        for xs, ys in zip(x.split(8), labels.split(8), strict=True):
            with accelerator.accumulate(net):
                accelerator.backward(F.cross_entropy(net(xs), ys))  # the mean of 8; Accelerate divides by 3
                optimizer.step()
                optimizer.zero_grad()
    assert_same_state(model.state_dict(), expected.state_dict(), tol=tolerance("one_step", torch.float32))


@pytest.mark.slow  # imports Lightning
def test_lightning_commits_once_per_accumulated_step(model, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own, about its loaders and its dependencies
        lightning: Any = pytest.importorskip("lightning")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

        class Task(lightning.LightningModule):
            def __init__(self, net):
                super().__init__()
                self.net = net

            def training_step(self, batch, _):
                x, labels = batch
                return F.cross_entropy(self.net(x), labels)

            def configure_optimizers(self):
                return sgd(self.net.parameters())

        parts = [samples(torch.float32, seed=k) for k in range(2)]
        x, labels = (torch.cat(p) for p in zip(*parts, strict=True))
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, labels), batch_size=8)
        expected = plain(model, sgd)
        trainer = lightning.Trainer(
            max_epochs=1,
            accumulate_grad_batches=3,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(Task(model), loader)
    assert_same_state(model.state_dict(), expected.state_dict(), tol=tolerance("one_step", torch.float32))


@pytest.mark.slow  # imports Lightning
def test_the_calibration_callback_fits_the_estimates_to_weights_that_lightning_has_averaged(model, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own, about its loaders and its dependencies
        lightning: Any = pytest.importorskip("lightning")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

        class Task(lightning.LightningModule):
            def __init__(self, net):
                super().__init__()
                self.net = net

            def training_step(self, batch, _):
                x, labels = batch
                return F.cross_entropy(self.net(x), labels)

            def configure_optimizers(self):
                return sgd(self.net.parameters())

        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(*samples(torch.float32)), batch_size=8, shuffle=True
        )
        averaging = lightning.pytorch.callbacks.StochasticWeightAveraging(0.1, swa_epoch_start=1)
        callback = calibration_callback(forward=lambda task, batch: task.net(batch[0]))
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(
            max_epochs=3,
            accelerator="cpu",
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=[callback, averaging],  # the order must not matter
            **options,
        )
        trainer.fit(Task(model), loader)
    trained = estimates(model)
    mn.calibrate(model, [samples(torch.float32)])
    for name, value in estimates(model).items():
        assert_close_to_max(trained[name], value, tol=tolerance("one_step", torch.float32))


@pytest.mark.skipif(torch.__version__ < "2.7", reason="FSDP2 of torch 2.6 needs a GPU's streams")
@pytest.mark.slow  # starts processes
def test_fsdp2_commits_over_its_shards():
    model = SmallResNet(weight=mn.WS()).double()
    expected = copy.deepcopy(model)
    optimizer = sgd(expected.parameters())
    x, labels = samples()
    (F.cross_entropy(expected(x), labels, reduction="sum") / len(x)).backward()
    optimizer.step()
    for result in launch(fsdp_step, 2, model):
        assert_same_state(result, expected.state_dict(), tol=tolerance("one_step", torch.float64))


def test_data_parallel_is_refused_by_name():
    norm = mn.nn.BatchChannelNorm(4, 2)
    with pytest.raises(RuntimeError, match=r"DataParallel.*DistributedDataParallel"):
        norm._replicate_for_data_parallel()  # what nn.DataParallel calls; without two GPUs it replicates nothing
