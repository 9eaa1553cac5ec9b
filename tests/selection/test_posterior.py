import pytest
import torch
from scenarios import conv_net, digits, trained_net
from torch import nn

from coreset_sampler import DiagonalLaplace, PointMass, Snapshots, SphericalGaussian, Trajectory
from coreset_sampler.selection.scoring import ScoringView


def view_of(model, **settings):
    model.eval()
    data = digits()
    options = dict(forward_fn=None, collate_fn=None, batch_size=128, num_workers=0, progress=False, seed=0)
    return ScoringView(data, model, data.tensors[1], **{**options, **settings})


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_a_point_mass_draws_the_model_itself():
    assert PointMass().draw(view_of(conv_net()), 3, seeded()) == [{}, {}, {}]


def test_draws_are_what_the_seed_says():
    view = view_of(conv_net())
    first, again = (SphericalGaussian(0.1).draw(view, 2, seeded(5)) for _ in range(2))
    other = SphericalGaussian(0.1).draw(view, 2, seeded(6))
    assert all(torch.equal(first[k][name], again[k][name]) for k in range(2) for name in first[k])
    assert not torch.equal(first[0]["1.weight"], other[0]["1.weight"])
    assert not torch.equal(first[0]["1.weight"], first[1]["1.weight"])


def test_the_noise_has_the_scale_asked_for_and_only_where_asked():
    model = conv_net()
    draws = SphericalGaussian(0.3).draw(view_of(model), 500, seeded())
    assert set(draws[0]) == {"1.weight", "1.bias", "4.weight", "4.bias"}
    noise = torch.stack([draw["1.weight"] - model[1].weight for draw in draws])
    assert abs(float(noise.detach().mean())) < 0.03
    assert abs(float(noise.detach().std()) - 0.3) < 0.015


def test_redraw_shares_the_noise_of_the_layers_before_and_keeps_the_distribution():
    model = conv_net()
    draws = SphericalGaussian(0.3, redraw=1).draw(view_of(model), 400, seeded())
    assert all(draw["1.weight"] is draws[0]["1.weight"] for draw in draws)
    assert all(draw["4.weight"] is not draws[0]["4.weight"] for draw in draws[1:])
    over_seeds = torch.stack(
        [SphericalGaussian(0.3, redraw=1).draw(view_of(model), 1, seeded(s))[0]["1.weight"] for s in range(200)]
    )
    assert abs(float((over_seeds - model[1].weight).detach().std()) - 0.3) < 0.02


def test_the_fisher_diagonal_equals_the_one_summed_example_by_example():
    model = trained_net().eval()
    view = view_of(model)
    names = ["4.weight", "9.bias"]
    estimate = torch.stack(
        [torch.cat([f.flatten() for f in view.fisher(names, 64, seeded(s)).values()]) for s in range(1)]
    )[0]
    chosen = torch.randperm(1797, generator=seeded(0))[:64]
    parameters = dict(model.named_parameters())
    exact = torch.zeros_like(estimate)
    for x, _ in (digits()[i] for i in chosen.tolist()):
        log_p = model(x[None]).log_softmax(1)[0]
        for y in range(10):
            grads = torch.autograd.grad(log_p[y], [parameters[n] for n in names], retain_graph=True)
            exact += log_p[y].exp().detach() * torch.cat([g.flatten() for g in grads]) ** 2 / 64
    ratio = float(estimate.sum() / exact.sum())
    assert 0.6 < ratio < 1.6
    many = torch.stack(
        [torch.cat([f.flatten() for f in view.fisher(names, 1797, seeded(s)).values()]) for s in range(4)]
    )
    assert float((many.std(0) / many.mean(0)).mean()) < 1.0


def test_laplace_is_wide_where_the_loss_is_flat():
    model = trained_net().eval()
    view = view_of(model)
    fisher = view.fisher(["4.weight"], 512, seeded())["4.weight"]
    draws = DiagonalLaplace(examples=512, prior=1.0).draw(view, 300, seeded(1))
    deviation = torch.stack([draw["4.weight"] for draw in draws]).std(0)
    assert torch.corrcoef(torch.stack([fisher, deviation]))[0, 1] < -0.3
    assert float(deviation.max()) <= 1.2  # never wider than the prior allows


def test_laplace_of_zero_scale_is_the_point_mass():
    model = trained_net().eval()
    draw = DiagonalLaplace(scale=0.0).draw(view_of(model), 1, seeded())[0]
    assert all(torch.equal(draw[name], dict(model.named_parameters())[name]) for name in draw)


def test_snapshots_are_the_latest_states():
    model, snapshots = conv_net(), Snapshots()
    for value in (1.0, 2.0, 3.0):
        nn.init.constant_(model[9].bias, value)
        snapshots.add(model, keep=2)
    draws = snapshots.draw(view_of(model), 2, seeded())
    assert [float(draw["9.bias"][0]) for draw in draws] == [2.0, 3.0]
    view = view_of(model)
    first, second = next(view.gradients([torch.arange(4)], draws))
    assert torch.allclose(first, second)  # a constant added to every logit changes nothing


def test_bad_settings_are_refused():
    for build, message in [
        (lambda: SphericalGaussian(-1.0), "scale"),
        (lambda: SphericalGaussian(float("nan")), "scale"),
        (lambda: SphericalGaussian(redraw=0), "redraw"),
        (lambda: DiagonalLaplace(prior=0.0), "prior"),
        (lambda: Snapshots().draw(view_of(conv_net()), 2, seeded()), "holds 0 states"),
        (lambda: Snapshots([{"nowhere": torch.ones(1)}]).draw(view_of(conv_net()), 1, seeded()), "nowhere"),
    ]:
        with pytest.raises(ValueError, match=message):
            build()


def test_a_trajectory_has_no_draws_and_says_who_reads_it():
    assert Trajectory().observes
    assert not getattr(PointMass(), "observes", False)
    assert repr(Trajectory(SphericalGaussian(0.2, "head"))).startswith("Trajectory(noise=SphericalGaussian(scale=0.2")
    with pytest.raises(TypeError, match=r"no draws.*Stable, LabelConfidence and LossPruning.*PointMass\(\)"):
        Trajectory().draw(view_of(conv_net()), 1, seeded())


@pytest.mark.parametrize("noise", [SphericalGaussian(0.1, "norm"), SphericalGaussian(), PointMass(), 0.1])
def test_noise_on_a_trajectory_is_in_the_head_alone(noise):
    with pytest.raises(ValueError, match="noise must be a SphericalGaussian in the head or None, got .*pass Spherical"):
        Trajectory(noise)
