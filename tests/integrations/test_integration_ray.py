"""Ray Train on two workers: the share of each, their agreement, and the sampler that Ray would drop."""

import functools

import pytest

pytest.importorskip("ray.train.torch")

from frameworks import SIZE, epochs_of, first_coreset, ray_session

pytestmark = pytest.mark.integration


def on_a_worker():
    """Runs on each worker; gives back what it saw through the returned dict of each rank."""
    import ray.train
    import ray.train.torch
    import torch
    from coreset_sampler.integrations.ray import prepare_data_loader
    from frameworks import Noted, loss_of, network, settings
    from torch.utils.data import DataLoader

    from coreset_sampler import CoresetSampler, DistributedCoresetSampler

    torch.set_num_threads(1)

    def run(state=None, stop=3):
        torch.manual_seed(0)
        data = Noted()
        model = ray.train.torch.prepare_model(network())
        sampler = DistributedCoresetSampler(data, model, **settings(selection_dataset=Noted()))
        if state:
            model.load_state_dict(state["model"])
            sampler.load_state_dict(state["sampler"])
        loader = prepare_data_loader(DataLoader(data, batch_size=9, sampler=sampler))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        coresets = []
        for epoch in range(sampler.epoch, stop):
            sampler.set_epoch(epoch)
            for batch in loader:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
            coresets.append(sampler.coreset.indices.tolist())
        state = {"model": {k: v.clone() for k, v in model.state_dict().items()}, "sampler": sampler.state_dict()}
        kept = loader.sampler is sampler or getattr(loader, "_dataloader", loader).sampler is sampler
        return dict(seen=data.seen, coresets=coresets, kept=kept, selections=sampler.stats["selections"]), state

    straight, _ = run()
    _, state = run(stop=1)
    resumed, _ = run(state)
    unsharded = CoresetSampler(Noted(), network(), **settings())
    try:
        prepare_data_loader(DataLoader(unsharded.dataset, batch_size=9, sampler=unsharded))
        refused = ""
    except TypeError as error:
        refused = str(error)
    out = dict(straight=straight, resumed=resumed, refused=refused)
    found = [None] * ray.train.get_context().get_world_size()
    torch.distributed.all_gather_object(found, out)
    return found


@functools.cache
def two_workers():
    return ray_session(on_a_worker)


def test_two_workers_agree_and_each_trains_on_its_own_share_of_the_coreset():
    first, second = (rank["straight"] for rank in two_workers())
    assert first["kept"]
    assert first["coresets"] == second["coresets"]
    assert first["selections"] == second["selections"] == 3
    assert len(set(first["coresets"][0]) & set(first_coreset())) > 0.95 * SIZE
    for e, (own, other) in enumerate(zip(epochs_of(first["seen"], 3), epochs_of(second["seen"], 3), strict=True)):
        assert len(own) == len(other) == SIZE // 2
        assert {*own, *other} <= set(first["coresets"][e])
        assert len({*own, *other}) > 0.6 * SIZE


def test_resume_is_exact():
    for rank in two_workers():
        assert rank["resumed"]["seen"] == rank["straight"]["seen"][SIZE // 2 :]


def test_a_sampler_that_ray_would_drop_is_refused():
    for rank in two_workers():
        assert "Use DistributedCoresetSampler" in rank["refused"]
