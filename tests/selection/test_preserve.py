"""What a selection must not do to a model, and what others must not do to it meanwhile."""

import copy
import logging
import threading
import time
from collections import OrderedDict

import pytest
import torch
from scenarios import conv_net, digits, trained_net
from test_integrity import MODELS, Caching, Checkpointed, assert_unchanged, snapshot, trained, vectors
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import Dataset, TensorDataset

from coreset_sampler import Coreset, CoresetSampler, DiagonalLaplace, SphericalGaussian, strategies
from coreset_sampler.selection import labels, preserve, scoring


def draws_and_gradients(model, data, posterior):
    seen = {}

    def look(view, size, generator):
        seen["draws"] = posterior.draw(view, 3, generator)
        seen["gradients"] = next(view.gradients([torch.arange(12)], seen["draws"]))
        return strategies.Uniform().select(view, size, None, generator)[0]

    CoresetSampler(data, model, size=5, strategy=look, scoring_batch_size=8, progress=False).select()
    return seen["draws"], seen["gradients"]


@pytest.mark.parametrize("kind", ["shared modules", "same layer twice", "tied weights", "LSTM", "caching in eval"])
def test_a_draw_equals_a_copy_of_the_model_with_that_noise_wherever_the_weights_are_kept(kind):
    model, data, _ = trained(kind)
    x, y = (t[:12] for t in data.tensors)
    for draw, gradients in zip(*draws_and_gradients(model, data, SphericalGaussian(0.3, "all")), strict=True):
        noisy, _, _ = trained(kind)
        parameters = dict(noisy.named_parameters(remove_duplicate=False))
        for name, value in draw.items():
            parameters[name].data.copy_(value)
        expected = noisy.eval()(x).softmax(1) - nn.functional.one_hot(y, 3)
        assert torch.allclose(gradients, expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["plain", "LoRA", "folding in eval", "writing", "moving", "embedding, max_norm"])
def test_a_model_too_large_to_copy_comes_back_as_it_was(kind, monkeypatch):
    monkeypatch.setattr(scoring, "COPIED_WHOLE", 0)
    monkeypatch.setattr(preserve, "COPIED_WHOLE", 0)
    model, data, _ = trained(kind)
    before = snapshot(model)
    for layers in ("auto", "all"):
        strategy = strategies.Stable(posterior=SphericalGaussian(0.1, layers))
        CoresetSampler(data, model, size=9, scoring_batch_size=4, strategy=strategy, progress=False).select()
        assert_unchanged(before, model)


def test_nothing_of_a_large_model_is_copied_that_is_not_written_to(monkeypatch):
    monkeypatch.setattr(preserve, "COPIED_WHOLE", 0)
    copies = []
    monkeypatch.setattr(torch.UntypedStorage, "clone", lambda self: copies.append(self))
    with preserve.preserve_state(conv_net(), seed=0):
        pass
    assert copies == []


def test_weights_that_somebody_caches_for_a_while_are_drawn_all_the_same():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(12, 3)))
    with parametrize.cached():
        model(vectors().tensors[0])
        cached = model[0].weight
        _, gradients = draws_and_gradients(model, vectors(), SphericalGaussian(0.3, "all"))
        assert model[0].weight is cached
    assert not torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize("strategy", [strategies.Stable(), strategies.Crest(), strategies.Herding()])
def test_lazy_modules_that_have_never_run_are_refused_and_stay_as_they_are(strategy):
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match=r"0\.weight of Sequential is lazy .* Run the model on one batch"):
        CoresetSampler(vectors(), model, size=5, strategy=strategy).select()
    assert nn.parameter.is_lazy(model[0].weight)
    CoresetSampler(vectors(), model, size=5, strategy=strategies.Uniform()).select()  # which does not run it


@pytest.mark.parametrize("strategy", [strategies.Stable(), strategies.Crest(), strategies.Herding()])
def test_a_model_without_values_is_refused(strategy):
    with torch.device("meta"):
        model = conv_net()
    with pytest.raises(ValueError, match=r"0\.weight of Sequential is on the meta device.*Load the model"):
        CoresetSampler(digits(), model, size=50, strategy=strategy).select()
    CoresetSampler(digits(), model, size=50, strategy=strategies.Uniform()).select()


@pytest.mark.integration
def test_a_model_that_accelerate_has_offloaded_is_refused():
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(conv_net(), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="accelerate has offloaded"):
        CoresetSampler(digits(), model, size=50, strategy="stable").select()


class Meeting(nn.Module):
    """Waits in its forward until another thread has had its turn."""

    def __init__(self):
        super().__init__()
        self.net = trained_net()
        object.__setattr__(self, "inside", threading.Event())
        object.__setattr__(self, "go_on", threading.Event())

    def forward(self, x):
        self.inside.set()
        assert self.go_on.wait(30)
        return self.net(x)


def test_what_another_thread_does_to_the_model_meanwhile_is_refused():
    model = Meeting().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = conv_net()
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    before = snapshot(model)
    sampler = CoresetSampler(digits(), model, size=50, progress=False, strategy="stable")
    sampler.read_labels()  # read before the threads start
    selecting = threading.Thread(target=sampler.select)
    selecting.start()
    try:
        assert model.inside.wait(30)
        with pytest.raises(
            RuntimeError, match="the model was called while another thread selects.*or give the sampler"
        ):
            model(digits().tensors[0][:4])
        with pytest.raises(RuntimeError, match="an optimizer step while another thread selects"):
            optimizer.step()
        other(digits().tensors[0][:4]).sum().backward()
        others.step()
    finally:
        model.go_on.set()
        selecting.join()
    assert sampler.stats["selections"] == 1
    model.inside.clear()
    before["random"] = snapshot(model)["random"]  # a training step of the other network has drawn numbers
    assert_unchanged(before, model)
    model(digits().tensors[0][:4]).sum().backward()
    optimizer.step()


def test_threads_that_select_with_one_model_take_turns_and_agree():
    model = trained_net().train()
    expected = CoresetSampler(digits(), model, size=50, progress=False, strategy="stable").select().indices
    before, picks = snapshot(model), []

    def select():
        picks.append(CoresetSampler(digits(), model, size=50, progress=False, strategy="stable").select().indices)

    threads = [threading.Thread(target=select) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(picks) == 4
    assert all(torch.equal(pick, expected) for pick in picks)
    assert_unchanged(before, model)


@pytest.mark.parametrize("kind", ["no norm", "linear", "no matrix"])
def test_the_default_works_without_norm_layers_and_says_what_it_perturbs(kind, caplog):
    model, data = MODELS[kind][0](), vectors()
    sampler = CoresetSampler(data, model, size=9, progress=False, strategy="stable")
    with caplog.at_level(logging.INFO, "coreset_sampler"):
        sampler.select()
    assert sampler.stats["perturbed_parameters"] == {"no norm": 27, "linear": 39, "no matrix": 3}[kind]
    assert "has no norm layer: perturbing" in caplog.text


def test_the_default_without_any_parameter_looks_at_the_model_as_it_is():
    sampler = CoresetSampler(vectors(), nn.AdaptiveAvgPool1d(3), size=9, progress=False, strategy="stable")
    assert len(sampler.select()) == 9


def test_the_default_is_the_norm_layers_where_there_are_some(caplog):
    sampler = CoresetSampler(digits(), trained_net(), size=50, progress=False, strategy="stable")
    named = strategies.Stable(posterior=SphericalGaussian(0.1, "norm"))
    expected = CoresetSampler(digits(), trained_net(), size=50, strategy=named, progress=False).select()
    with caplog.at_level(logging.INFO, "coreset_sampler"):
        assert torch.equal(sampler.select().indices, expected.indices)
    assert sampler.stats["perturbed_parameters"] == 32
    assert caplog.text == ""


def test_norm_layers_that_were_asked_for_are_still_missed():
    strategy = strategies.Stable(posterior=SphericalGaussian(0.1, "norm"))
    with pytest.raises(ValueError, match="no norm layer"):
        CoresetSampler(vectors(), nn.Linear(12, 3), size=9, strategy=strategy).select()


def test_an_empty_data_set_is_refused_at_the_door():
    empty = TensorDataset(torch.zeros(0, 12), torch.zeros(0, dtype=torch.int64))
    for settings in ({"fraction": 0.1}, {"size": 1}):
        with pytest.raises(ValueError, match="at least one example, got 0"):
            CoresetSampler(empty, nn.Linear(12, 3), **settings)


@pytest.mark.parametrize("strategy", [strategies.Herding, strategies.KCenter])
def test_embeddings_of_a_model_that_has_been_run_compiled_are_found(strategy):
    model = nn.Sequential(nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 3))  # no buffers: nothing to compile anew for
    expected = CoresetSampler(vectors(), model, size=9, strategy=strategy()).select()
    model.compile(backend="eager")
    with torch.no_grad():  # as selection does, so that there is compiled code without hooks for it
        model.eval()(vectors().tensors[0][:16])
        model(vectors().tensors[0])
    compiled = model._compiled_call_impl
    found = CoresetSampler(vectors(), model, size=9, strategy=strategy(), scoring_batch_size=36).select()
    assert torch.equal(found.indices, expected.indices)
    assert model._compiled_call_impl is compiled


class Hanging(Dataset):
    targets = list(range(3)) * 12

    def __len__(self):
        return 36

    def __getitem__(self, i):
        time.sleep(4)
        return torch.zeros(12), self.targets[i]


def test_a_worker_that_hangs_is_an_error(monkeypatch):
    monkeypatch.setattr(scoring, "WORKER_TIMEOUT", 1)
    assert labels.WORKER_TIMEOUT > 60
    with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
        CoresetSampler(
            Hanging(),
            nn.Linear(12, 3),
            size=9,
            num_workers=1,
            scoring_batch_size=1,
            progress=False,
            strategy="stable",
        ).select()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("layers", ["norm", "all", ["body.1"]])
def test_laplace_names_a_reentrant_checkpoint_that_hides_its_layers(layers):
    strategy = strategies.Stable(posterior=DiagonalLaplace(layers=layers))
    with pytest.raises(ValueError, match="reentrant checkpoint, which hides it. Pass use_reentrant=False"):
        CoresetSampler(vectors(), Checkpointed(reentrant=True), size=9, strategy=strategy).select()
    outside = nn.Sequential(nn.LayerNorm(12), Checkpointed(reentrant=True))  # the checkpoint's input needs a gradient
    with pytest.raises(ValueError, match="reentrant checkpoint, which hides it. Pass use_reentrant=False"):
        CoresetSampler(
            vectors(), outside, size=9, strategy=strategies.Stable(posterior=DiagonalLaplace(layers="all"))
        ).select()
    head = strategies.Stable(posterior=DiagonalLaplace(layers=["head"]))
    CoresetSampler(vectors(), Checkpointed(reentrant=True), size=9, strategy=head).select()


def test_a_draw_of_something_that_the_model_does_not_have_is_named():
    class Elsewhere:
        def draw(self, view, draws, generator):
            return [{"nowhere": torch.zeros(3)}] * draws

    with pytest.raises(ValueError, match="'nowhere', which Caching does not have"):
        draws_and_gradients(Caching(), vectors(), Elsewhere())


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_model_is_looked_at_as_it_is_and_draws_are_refused():
    model = torch.jit.script(conv_net())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for strategy in (strategies.Crest(), strategies.Stable()):
        sampler = CoresetSampler(digits(), model, size=50, strategy=strategy)
        sampler.select()
        assert sampler.stats["perturbed_parameters"] == 0
    drawn = strategies.Stable(posterior=SphericalGaussian(0.1, "all"))
    with pytest.raises(ValueError, match=r"Pass the model before torch\.jit\.script"):
        CoresetSampler(digits(), model, size=50, strategy=drawn).select()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert model.training


def test_a_model_that_selection_only_watches_is_left_alone_until_it_is_run():
    model = conv_net().train()
    with preserve.preserve_state(model, seed=0, lazily=True) as look_after:
        assert model.training
        look_after()
        look_after()
        assert not model.training
        model(torch.randn(4, 1, 8, 8))
    assert model.training


class Sums:
    """Reads what training said, and runs the model all the same, by the view or by itself."""

    observes = True

    def __init__(self, by_itself: bool) -> None:
        self.by_itself, self.modes = by_itself, []

    def select(self, view, size, state, generator):
        indices = torch.randperm(len(view.labels), generator=generator)[:size]
        if self.by_itself:
            view.model.norm.running_mean.add_(1)
            self.modes.append(view.model.training)
        else:
            list(view.gradients([indices]))
            self.modes.append(view.model.training)
        return Coreset(indices, torch.ones(size, dtype=torch.float64)), None


@pytest.mark.parametrize("by_itself", [False, True])
def test_a_strategy_that_watches_and_runs_the_model_leaves_it_as_it_was(by_itself):
    model = nn.Sequential(OrderedDict(flat=nn.Flatten(), norm=nn.BatchNorm1d(4), head=nn.Linear(4, 2))).train()
    data, before = TensorDataset(torch.randn(40, 4), torch.arange(40) % 2), copy.deepcopy(model.state_dict())
    strategy = Sums(by_itself)
    sampler = CoresetSampler(data, model, size=10, strategy=strategy, progress=False)
    sampler.select()
    assert strategy.modes == [False]
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
