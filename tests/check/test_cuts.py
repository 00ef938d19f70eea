"""`check_cuts` passes what keeps the law, and finds what breaks it at its place and by its cause."""

import resource
import time

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import micronorm as mn
from tests.check.clean import CLEAN, Loop, Shared, Transformer
from tests.check.faults import FAULTS
from tests.check.parts import Net, Padding, ProposalsPerImage, contrastive, images, one_by_one, ragged, summed
from tests.networks import SmallResNet

planted = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())


@planted
def test_a_planted_fault_is_found_in_its_place_with_its_cause(fault):
    report = mn.check_cuts(fault.model(), fault.batch(), fault.loss)
    assert not report
    assert [(f.where, f.cause) for f in report.findings] == [(fault.where, fault.cause)], str(report)
    assert report.findings[0].evidence


@planted
def test_the_twin_without_the_fault_passes(fault):
    report = mn.check_cuts(fault.twin(), fault.batch(), fault.twin_loss or fault.loss)
    assert report, str(report)
    assert report.compared > 0


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("make, batch, loss", CLEAN.values(), ids=CLEAN.keys())
def test_a_model_that_keeps_the_law_passes(make, batch, loss):
    report = mn.check_cuts(make(), batch(), loss)
    assert report.ok, str(report)
    assert report.tolerance == 1e-12
    assert report.differences == []
    assert 0 <= report.worst <= 1e-12


def peak_memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.slow
def test_a_resnet50_is_checked_in_half_a_minute_and_two_gigabytes():
    model = torchvision.models.resnet50(norm_layer=mn.BCN())
    before, start = peak_memory_mb(), time.process_time()
    report = mn.check_cuts(model, images(6, 64), summed)
    assert report, str(report)
    assert time.process_time() - start < 30  # of the CPU: a busy machine changes nothing
    # In float64 the parameters are 0.2 GB: a copy, its gradients, those of the whole step, activations of six samples.
    assert peak_memory_mb() - before < 2000


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("joined", [False, True], ids=["list", "joined"])
@pytest.mark.parametrize("rows", [(3000, 5500), (80_000, 80_000)])
def test_thousands_of_rows_per_image_are_compared_however_they_are_returned(rows, joined, fault):
    def loss(model, part):
        boxes = model[0](part[0])
        return boxes.square().sum() if joined else torch.stack([b.square().sum() for b in boxes]).sum()

    x = images(2)[0] + torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1)
    report = mn.check_cuts(nn.Sequential(ProposalsPerImage(rows, joined=joined, mixes=fault)), (x,), loss)
    assert [(f.where, f.cause) for f in report.findings] == [("0", "mixes_samples")] * fault, str(report)


@pytest.mark.parametrize("weight", [mn.WS(), mn.WN(), mn.CWN()])
@pytest.mark.parametrize("norm", [mn.BCN(), mn.GN(), mn.LN(), mn.SN(), mn.BRN(), mn.FRN(), mn.EvoNormS0()])
def test_no_two_parameters_of_our_layers_share_a_gradient(norm, weight):
    model = SmallResNet(norm, weight)
    summed(model, images())[0].backward()
    addresses = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
    assert len(set(addresses)) == len(addresses) > 10


def test_the_twins_of_this_file_can_fail():
    """The clean ones fail once their loss does: nothing passes because nothing was compared."""
    for make, batch in ((Shared, images), (lambda: Loop(Net(nn.Identity())), ragged), (lambda: Padding(12), ragged)):
        assert not mn.check_cuts(make(), batch(), lambda m, p: summed(m, p)[0] / len(p[1]))
    assert not mn.check_cuts(Net(nn.Identity()), images(), lambda m, p: contrastive(m, p, between_samples=True))
    assert mn.check_cuts(Net(nn.Identity()), ragged(), one_by_one)


# --- places ---------------------------------------------------------------------------------------------------------


def test_a_check_that_will_take_long_says_so_after_the_first_forward_and_how_to_shorten_it(monkeypatch):
    monkeypatch.setattr("micronorm.check.runs._LONG", 0.0)
    with pytest.warns(UserWarning, match="about 0 minutes.*two or three samples, or smaller images") as caught:
        assert mn.check_cuts(SmallResNet(mn.BCN()), images(2), summed).ok
    assert len(caught) == 1


def test_two_faults_are_found_in_execution_order():
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Flatten(), nn.Linear(288, 5)]
    report = mn.check_cuts(nn.Sequential(*layers), images(), summed)
    assert [(f.where, f.cause) for f in report.findings] == [("1", "batch_statistics"), ("2", "randomness")]


def test_the_first_of_many_batch_norms_is_named_also_where_a_later_one_raises():
    model = torchvision.models.resnet18(num_classes=5)
    report = mn.check_cuts(model, images(2, 32), summed)  # one sample has one value per channel in layer4
    assert (report.findings[0].where, report.findings[0].cause) == ("bn1", "batch_statistics")
    assert report.findings[0].evidence["modules of this kind in the model"] == 20


def test_a_batch_norm_that_cannot_take_one_sample_is_named():
    model = nn.Sequential(nn.Conv2d(3, 8, 8), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 5))
    found = mn.check_cuts(model, images(2), summed).findings[0]
    assert (found.where, found.cause) == ("1", "batch_statistics")
    assert "more than 1 value per channel" in str(found)


def test_a_fault_in_a_sequence_first_model_is_found():
    class AcrossSamples(nn.Module):
        def forward(self, x):
            return x - x.mean(1, keepdim=True)

    found = mn.check_cuts(Transformer(False, AcrossSamples()), images(), summed).findings[0]
    assert (found.where, found.cause) == ("norm", "mixes_samples")


def test_a_fault_in_the_second_call_of_a_shared_module_is_found():
    class SecondCall(nn.Module):
        def forward(self, x, mixes):
            return x - x.mean(0) if mixes else x

    class Model(Shared):
        def __init__(self):
            super().__init__()
            self.twice = SecondCall()

        def forward(self, x):
            return super().forward(self.twice(self.twice(x, mixes=False), mixes=True))

    found = mn.check_cuts(Model(), images(), summed).findings[0]
    assert (found.where, found.cause) == ("twice", "mixes_samples")


def test_code_before_a_faulty_child_is_blamed_first():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.head = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(3), nn.Linear(11, 5)

        def forward(self, x):
            mixed = self.conv(x - x.mean(0))
            return self.head(torch.cat([mixed, self.bn(x)], 1).mean((2, 3)))

    found = mn.check_cuts(Both(), images(), summed).findings[0]
    assert (found.where, found.cause) == ("model", "mixes_samples")


def test_models_whose_calls_depend_on_the_cut_do_not_crash_the_search():
    report = mn.check_cuts(
        Loop(Net(nn.Identity())), ragged(), lambda m, p: F.cross_entropy(m(p[0]), torch.tensor(p[1]))
    )
    assert [(f.where, f.cause) for f in report.findings] == [("loss", "averaged_loss")]

    class Twice(nn.Module):
        """Calls its network once for one sample and twice for more: no calls match."""

        def __init__(self):
            super().__init__()
            self.net = Net(nn.BatchNorm2d(8))

        def forward(self, x):
            return self.net(x) if len(x) == 1 else (self.net(x) + self.net(x)) / 2

    assert not mn.check_cuts(Twice(), images(), summed)


def test_random_numbers_that_another_seed_does_not_show_are_seen_to_be_drawn():
    class OnlyWhenCut(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x) if len(x) < 6 else x

    class InTheLoss:
        def __call__(self, model, part):
            x, labels = part
            return summed(model, (x + torch.randn_like(x) if len(x) < 6 else x, labels))

    for model, loss, where in ((Net(OnlyWhenCut()), summed, "middle"), (Net(nn.Identity()), InTheLoss(), "loss")):
        report = mn.check_cuts(model, images(), loss)
        assert [(f.where, f.cause) for f in report.findings] == [(where, "randomness")]


def test_state_outside_the_model_is_told_from_randomness():
    calls = []

    def loss(model, part):
        calls.append(1)
        total, count = summed(model, part)
        return total * len(calls), count

    report = mn.check_cuts(Net(nn.Identity()), images(), loss)
    assert [(f.where, f.cause) for f in report.findings] == [("loss", "state")]


def test_a_loss_that_is_a_method_is_copied_with_its_module():
    class Task(nn.Module):
        def __init__(self, momentum):
            super().__init__()
            self.net, self.momentum = Net(nn.Identity()), momentum
            self.register_buffer("scale", torch.ones(()))

        def loss(self, model, part):
            total, count = summed(model.net, part)
            self.scale.lerp_(torch.tensor(0.0), self.momentum)
            return total * self.scale, count

    task = Task(0.1)
    report = mn.check_cuts(task, images(), task.loss)
    assert task.scale == 1
    assert [(f.where, f.cause) for f in report.findings] == [("loss", "state")]
    still = Task(0.0)
    assert mn.check_cuts(still, images(), still.loss)


def test_float32_inside_a_model_is_allowed_for_and_noted():
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            return (x.flatten(2).float() @ self.mix.float()).sigmoid().reshape(x.shape).to(x.dtype)

    class Visible(Narrow):
        def forward(self, x):
            return super().forward(x).float()

    for module in (Narrow(), Visible()):
        model = nn.Sequential(nn.Conv2d(3, 8, 1), module, _ToDouble(), nn.Flatten(), nn.Linear(512, 5))
        report = mn.check_cuts(model, images(), summed)
        assert report, str(report)
        assert report.tolerance in (1e-12, 1e-5)
    assert report.tolerance == 1e-5
    assert "narrower type" in report.notes[0]


def test_a_batch_norm_that_gets_one_sample_at_a_time_is_noted():
    net = Net(nn.BatchNorm2d(8))
    for norm, notes in ((nn.BatchNorm2d(8), 1), (nn.BatchNorm2d(8).eval().requires_grad_(False), 0)):
        net.middle = norm
        report = mn.check_cuts(Loop(net), images(), summed)
        assert report, str(report)
        assert len(report.notes) == notes
        assert all("batch statistics of net.middle: every forward had one sample" in n for n in report.notes)


class _ToDouble(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


# --- numbers that are not finite ------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_is_said_to_be_so_and_its_module_named():
    model = Net(nn.Sequential(nn.ReLU(), _Log()))
    report = mn.check_cuts(model, images(), summed)
    assert not report
    assert [(f.where, f.cause) for f in report.findings] == [("middle.1", "non_finite")]


class _Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log() * 0


def test_a_mean_over_nothing_in_one_part_is_said_to_be_not_finite():
    def loss(model, part):
        x, labels = part
        chosen = labels > 0
        return F.cross_entropy(model(x)[chosen], labels[chosen])

    x, _ = images()
    found = mn.check_cuts(Net(nn.Identity()), (x, torch.tensor([1, 2, 3, 0, 0, 0])), loss).findings[0]
    assert (found.where, found.cause) == ("loss", "non_finite")
    assert found.evidence["samples"] == [3, 4, 5]


def test_a_model_whose_weights_are_not_finite_is_said_to_have_diverged():
    model = Net(nn.Identity())
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    name = next(name for name, _ in model.named_parameters())
    found = mn.check_cuts(model, images(), summed).findings[0]
    assert (found.cause, found.evidence["parameters"]) == ("non_finite", [name])
    assert "smaller learning rate" in found.fix
