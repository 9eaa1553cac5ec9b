"""accelerate: `prepare` and `register_for_checkpointing`, one process and two, and each way in which it could go wrong."""

import pytest
import torch
from frameworks import SIZE, Noted, epochs_of, first_coreset, loss_of, network, settings, two_processes
from torch.utils.data import DataLoader, RandomSampler

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.integration

from coreset_sampler import CoresetSampler  # noqa: E402


def prepared(**more):
    accelerator, data, net = accelerate.Accelerator(cpu=True), Noted(), network()
    sampler = CoresetSampler(data, net, **settings(selection_dataset=Noted(), **more))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loader = DataLoader(data, batch_size=9, sampler=sampler)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    accelerator.register_for_checkpointing(sampler)
    return accelerator, data, sampler, model, optimizer, loader


def train(parts, *, until=3, skip=0, save=None):
    accelerator, _, sampler, model, optimizer, loader = parts
    for epoch in range(sampler.epoch, until):
        loader.set_epoch(epoch)
        shown = accelerator.skip_first_batches(loader, skip) if skip else loader
        skip = 0
        for i, batch in enumerate(shown):
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            if save and (epoch, i) == save[0]:
                accelerator.save_state(save[1])
                return


def test_one_process_trains_on_the_coreset_that_a_plain_loop_would_select():
    parts = prepared()
    train(parts)
    _, data, sampler, *_ = parts
    epochs = epochs_of(data.seen, 3)
    assert len(epochs[0]) == SIZE
    assert set(epochs[0]) <= set(first_coreset())
    assert sampler.stats["selections"] == 3
    assert len({frozenset(epoch) for epoch in epochs}) == 3


def test_resume_from_the_middle_of_an_epoch_is_exact(tmp_path):
    straight = prepared()
    train(straight)
    stopped = prepared()
    train(stopped, save=((1, 3), tmp_path / "state"))
    resumed = prepared()
    resumed[0].load_state(tmp_path / "state")
    train(resumed, skip=4)
    assert resumed[1].seen == straight[1].seen[SIZE + 4 * 9 :]
    for one, other in zip(straight[3].parameters(), resumed[3].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_state_from_the_middle_is_refused_where_nobody_skips_what_was_done(tmp_path):
    stopped = prepared()
    train(stopped, save=((1, 3), tmp_path / "state"))
    resumed = prepared()
    resumed[0].load_state(tmp_path / "state")
    with pytest.raises(RuntimeError, match="skip_first_batches"):
        train(resumed)


def test_a_prepared_loader_that_counts_from_0_after_a_resume_is_refused(tmp_path):
    stopped = prepared()
    train(stopped, until=2)
    stopped[0].save_state(tmp_path / "state")
    accelerator, _, sampler, _, _, loader = prepared()
    accelerator.load_state(tmp_path / "state")
    assert sampler.epoch == 2
    with pytest.raises(ValueError, match="call set_epoch on a loader that accelerate prepared"):
        next(iter(loader))


def test_the_sampler_is_not_one_that_accelerate_replaces_and_a_generator_put_on_it_changes_nothing():
    _, data, sampler, _, _, loader = prepared()
    assert not isinstance(sampler, RandomSampler)
    assert loader.batch_sampler.sampler is sampler
    sampler.generator = torch.Generator().manual_seed(99)
    for _ in loader:
        pass
    assert data.seen == list(CoresetSampler(Noted(), network(), **settings()))


def test_two_processes_agree_share_out_once_and_resume_exactly():
    ranks = [rank["accelerate"] for rank in two_processes()]
    first, second = (rank["straight"] for rank in ranks)
    assert first["coresets"] == second["coresets"]
    assert first["selections"] == second["selections"] == 3
    for e, (mine, other) in enumerate(zip(epochs_of(first["seen"], 3), epochs_of(second["seen"], 3), strict=True)):
        assert len(mine) == len(other) == SIZE // 2
        assert set(mine) | set(other) <= set(first["coresets"][e])
        drawn = sorted(mine + other)
        assert len(set(drawn)) > 0.6 * SIZE  # sharded twice, half of them would never be seen
    for rank in ranks:
        done = SIZE // 2 + 2 * 9
        assert rank["middle"]["seen"] == rank["straight"]["seen"][done:]
        assert rank["end"]["seen"] == rank["straight"]["seen"][SIZE:]


def test_two_processes_select_first_what_one_selects():
    first = two_processes()[0]["accelerate"]["straight"]["coresets"][0]
    assert len(set(first) & set(first_coreset())) > 0.95 * SIZE


def test_on_two_processes_what_would_go_wrong_in_silence_is_an_error_that_names_the_way_out():
    for rank in two_processes():
        assert "Use CoresetSampler with accelerator.prepare" in rank["accelerate"]["twice"]
        assert "skip_first_batches" in rank["accelerate"]["unskipped"]
        assert "Start the loop at sampler.epoch" in rank["accelerate"]["from_zero"]


def test_torchrun_needs_nothing_but_the_distributed_sampler():
    first, second = (rank["torchrun"] for rank in two_processes())
    assert first["replicas"] == second["replicas"] == (1, 2)  # the process group came after the sampler
    assert first["coresets"] == second["coresets"]
    assert len(set(first["coresets"][0]) & set(first_coreset())) > 0.95 * SIZE
    for e, (mine, other) in enumerate(zip(epochs_of(first["seen"], 3), epochs_of(second["seen"], 3), strict=True)):
        assert len(mine) == len(other) == SIZE // 2
        assert set(mine) | set(other) <= set(first["coresets"][e])
    assert first["stats"]["selections"] == 3
